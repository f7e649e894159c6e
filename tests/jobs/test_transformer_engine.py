"""Test jobs of genuine Megatron-LM 0.19.2 with Transformer Engine's layer spec, under other layouts.

Transformer Engine's Python code is genuine: modules, parameters, recipes, quantized tensors, FusedAdam. Its kernels are
a stand-in without a forward pass, so gradients are computed from weights (`synthetic_training`): a job that resumes
exactly continues exactly, bit for bit. All jobs are one launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import MOMENTS_VARIABLE, assemble, training_state

from mcore_ckpt_ext import Legacy, TorchDist, compare, convert, inspect, open_checkpoint, verify
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from tests.harness.checkpoints import assert_converted, everything_in, fixture_named
from tests.harness.jobs import LAST, LEGACY, SAVED, Job, assert_same_training_state, differing
from tests.harness.layouts import SEQUENCE, Layout, experts_over
from tests.harness.models import GATED_EXPERTS, LATENT, LLAMA, QUERIES
from tests.harness.packages import engine_version, with_transformer_engine
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

_EXACT = ["--clip-grad", "0"]
ENGINE = ["--transformer-impl", "transformer_engine", *_EXACT]
GROUPED = [*GATED_EXPERTS, "--moe-grouped-gemm"]
PREDICTING = [*LLAMA, "--mtp-num-layers", "1"]
DELAYED = [*LLAMA, "--fp8-format", "hybrid", "--fp8-recipe", "delayed"]
TENSORWISE = [*LLAMA, "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
BLOCKWISE = [*LLAMA, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
MICROSCALED = [*GROUPED, "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]
GATHERED = [*TENSORWISE, "--fp8-param-gather"]
FIRST_SCALE = [*DELAYED, "--fp8-param-gather"]
# Two layers of gated delta nets, each before one of gated attention; the norms are stored less 1.
NETS = [*LLAMA, "--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "2"]
NETS += ["--linear-num-key-heads", "2", "--linear-num-value-heads", "4", "--linear-key-head-dim", "8"]
NETS += ["--linear-value-head-dim", "8", "--attention-output-gate", "--qk-layernorm", "--apply-layernorm-1p"]
INDEXED = [*LATENT, "--experimental-attention-variant", "dsa", "--dsa-indexer-n-heads", "2", "--dsa-indexer-topk", "8"]
INDEXED += ["--dsa-indexer-head-dim", "16"]
SQUARE, LONG, WIDE = Layout(2, 2, 4), Layout(1, 2, 4), Layout(2, 1, 4)
SPREAD = experts_over(1, 2, 4, 2)


@dataclass(frozen=True)
class Resumed:
    """A job that goes on from another."""

    source: str
    layout: Layout
    model: list[str]
    spec: tuple[str, ...] = tuple(ENGINE)


SAVES = {
    "dense": (SQUARE, [*LLAMA, *ENGINE]),
    "grouped": (SPREAD, [*GROUPED, *ENGINE]),
    "latent": (SQUARE, [*LATENT, *ENGINE]),
    "predicting": (WIDE, [*PREDICTING, *ENGINE]),
    "delayed": (SQUARE, [*DELAYED, *ENGINE]),
    "tensorwise": (SQUARE, [*TENSORWISE, *ENGINE]),
    "blockwise": (SQUARE, [*BLOCKWISE, *ENGINE]),
    "microscaled": (SPREAD, [*MICROSCALED, *ENGINE]),
    "gathered": (SQUARE, [*GATHERED, *ENGINE]),
    "first scale": (SQUARE, [*FIRST_SCALE, *ENGINE]),
    "nets": (SQUARE, [*NETS, *ENGINE]),
    "indexed": (LONG, [*INDEXED, *ENGINE]),
    "local": (SQUARE, [*LLAMA, *_EXACT]),
    "local experts": (SPREAD, [*GATED_EXPERTS, *_EXACT]),
    "local latent": (SQUARE, [*LATENT, *_EXACT]),
}
RESUMES = {
    "interleaved": Resumed("dense", Layout(1, 2, 4, virtual=True), LLAMA),
    "sequence parallel": Resumed("dense", Layout(2, 1, 4, more=SEQUENCE), LLAMA),
    "grouped, TP2": Resumed("grouped", experts_over(2, 1, 4, 1), GROUPED),
    "grouped, ETP2": Resumed(
        "grouped",
        Layout(2, 1, 4, more=(*SEQUENCE, "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "2")),
        GROUPED,
    ),
    "one by one": Resumed("grouped", SPREAD, GATED_EXPERTS),
    "latent, TP1": Resumed("latent", LONG, LATENT),
    "predicting, PP2": Resumed("predicting", LONG, PREDICTING),
    "delayed, TP1": Resumed("delayed", LONG, DELAYED),
    "tensorwise, TP1": Resumed("tensorwise", LONG, TENSORWISE),
    "blockwise, TP1": Resumed("blockwise", LONG, BLOCKWISE),
    "microscaled, EP4": Resumed("microscaled", experts_over(1, 1, 4, 4), MICROSCALED),
    "nets, TP1": Resumed("nets", LONG, NETS),
    "to the local spec": Resumed("dense", LONG, LLAMA, tuple(_EXACT)),
    "from the local spec": Resumed("local", LONG, LLAMA),
    "grouped, to the local spec": Resumed("grouped", experts_over(1, 2, 4, 2), GATED_EXPERTS, tuple(_EXACT)),
    "experts from the local spec": Resumed("local experts", experts_over(2, 1, 4, 2), GROUPED),
    "latent, to the local spec": Resumed("latent", LONG, LATENT, tuple(_EXACT)),
    "latent from the local spec": Resumed("local latent", Layout(1, 4, 4), LATENT),
}
# What a resumed job saved, resumed in turn: under a third layout, or as the job that began it.
AGAIN = {
    "dense again": Resumed("sequence parallel", Layout(1, 4, 4), LLAMA),
    "grouped again": Resumed("grouped, TP2", experts_over(1, 1, 4, 4), GROUPED),
    "one by one again": Resumed("one by one", experts_over(2, 1, 4, 2), GROUPED),
    "latent again": Resumed("latent, TP1", SQUARE, LATENT),
    "predicting again": Resumed("predicting, PP2", Layout(2, 2, 4), PREDICTING),
    "tensorwise again": Resumed("tensorwise, TP1", SQUARE, TENSORWISE),
    "dense, back from the local spec": Resumed("to the local spec", SQUARE, LLAMA),
    "experts, back to the local spec": Resumed(
        "experts from the local spec", experts_over(1, 2, 4, 2), GATED_EXPERTS, tuple(_EXACT)
    ),
    "latent, back to the local spec": Resumed("latent from the local spec", SQUARE, LATENT, tuple(_EXACT)),
}
# Where modules of Transformer Engine ask for extra states that nobody has written.
EMPTY = ("experts from the local spec", "latent from the local spec")
# Their weights are quantized anew under another layout, so gradients are others, and only the load can be compared.
GATHERING = {
    "gathered, same layout": Resumed("gathered", SQUARE, GATHERED),
    "gathered, TP1": Resumed("gathered", LONG, GATHERED),
    "gathered, to bf16": Resumed("gathered", LONG, LLAMA),
    "first scale, same layout": Resumed("first scale", SQUARE, FIRST_SCALE),
    "first scale, TP1": Resumed("first scale", LONG, FIRST_SCALE),
}


LOCAL = ("local", tuple(_EXACT))
ENGINE_IMPL = ("transformer_engine", tuple(ENGINE))


@dataclass(frozen=True)
class Converted:
    """A job of genuine Megatron without this package, which resumes what was converted to its layer spec."""

    source: str
    to: str
    layout: Layout
    model: list[str]
    spec: tuple[str, tuple[str, ...]]
    orderless: bool = False  # through model space, which does not show in which order the job registered parameters

    def commands(self, folder: Path) -> list[list[Any]]:
        """Of `mcore-ckpt`."""
        source, between = folder / self.source / "checkpoints", folder / f"{self.source} in model space"
        first = [["convert", source, between, "--to", "canonical"]] if self.orderless else []
        words: list[Any] = ["convert", between if self.orderless else source, self.run(folder), "--to", self.to]
        return [*first, [*words, "--transformer-impl", self.spec[0], "--megatron-version", "0.19.2", *self._cut]]

    @property
    def _cut(self) -> list[str]:
        return ["--pipeline-model-parallel-size", str(self.layout.pipeline)] if self.orderless else []

    def run(self, folder: Path) -> Path:
        return folder / f"{self.source} in {self.to} of {self.spec[0]}"

    @property
    def arguments(self) -> list[str]:
        return [*self.model, *self.spec[1], *(LEGACY if self.to == "legacy" else ())]


# Legacy files are for the layout of the source, torch_dist for any.
CONVERTED = {
    f"{source} in {to}, converted": Converted(
        source, to, SAVES[source][0] if to == "legacy" else elsewhere, model, spec
    )
    for source, elsewhere, model, spec in (
        ("dense", LONG, LLAMA, LOCAL),
        ("grouped", experts_over(2, 1, 4, 2), GATED_EXPERTS, LOCAL),
        ("latent", LONG, LATENT, LOCAL),
        ("local", WIDE, LLAMA, ENGINE_IMPL),
        ("local experts", experts_over(1, 1, 4, 4), GATED_EXPERTS, ENGINE_IMPL),
        ("local latent", LONG, LATENT, ENGINE_IMPL),
    )
    for to in ("torch_dist", "legacy")
}
# Only Transformer Engine's spec has gated delta nets and indexers.
CONVERTED["nets in legacy, converted"] = Converted("nets", "legacy", SQUARE, NETS, ENGINE_IMPL)
CONVERTED["indexed in legacy, converted"] = Converted("indexed", "legacy", LONG, INDEXED, ENGINE_IMPL, orderless=True)


# Written by jobs with a real build of Transformer Engine.
BUILT = {
    "p21": (Layout(2, 2, 4, vocabulary=256), [*LLAMA, "--add-qkv-bias", "--qk-layernorm"]),
    "p22": (
        SPREAD,
        [*GROUPED, *QUERIES, "--moe-ffn-hidden-size", "16", "--moe-shared-expert-intermediate-size", "24",
         "--moe-layer-freq", "[0,1,1,1]"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    folder = tmp_path_factory.mktemp("engine")
    both = {MOMENTS_VARIABLE: "load,save"}
    turns = [
        Turn(folder / name, layout, more=more, saves=True, until=LAST) for name, (layout, more) in SAVES.items()
    ] + [
        Turn(
            folder / name, job.layout, more=[*job.model, *job.spec], load=folder / job.source / "checkpoints",
            saves=job.source in SAVES, until=LAST, newest=LAST, environment=both,
        )
        for name, job in (RESUMES | AGAIN | GATHERING).items()
    ] + [
        Turn(
            folder / name, layout, more=[*model, *ENGINE], load=fixture_named(name).run, saves=True, until=LAST,
            newest=LAST, environment=both,
        )
        for name, (layout, model) in BUILT.items()
    ] + [
        Turn(
            folder / name, job.layout, more=[*job.arguments, "--no-load-rng"], load=job.run(folder), stock=True,
            saves=job.source == "nets", until=LAST, newest=LAST, commands=job.commands(folder), environment=both,
        )
        for name, job in CONVERTED.items()
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        with_transformer_engine(patch)
        yield run_in_turn(folder, turns, [launch.SYNTHETIC_TRAINING])


def dump(results: Results, name: str, iteration: int) -> Path:
    return results.job(name).folder / "dump" / f"after_save_{iteration:07d}"


def separate(dumped: Path) -> dict[str, torch.Tensor]:
    """A dump under names that do not depend on the layer spec: a norm is fused with a linear in one of them only."""
    pairs = {
        ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
        ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
        ".self_attention.linear_q_up_proj.layer_norm_": ".self_attention.q_layernorm.",
        ".self_attention.linear_kv_up_proj.layer_norm_": ".self_attention.kv_layernorm.",
    }
    found = assemble(dumped)
    for fused, own in pairs.items():
        found = {name.replace(fused, own): values for name, values in found.items()}
    return found


@pytest.mark.parametrize("name", [*RESUMES, *AGAIN])
def test_resumed_and_gone_on_exactly(results: Results, name: str) -> None:
    source, resumed = (RESUMES | AGAIN)[name].source, results.job(name)
    begun = LAST if source in RESUMES else SAVED
    assert any("verified equal to their weights" in line for line in resumed.said)
    saved = dump(results, source, begun)
    assert differing(separate(saved), separate(resumed.at_load)) == []
    assert training_state(saved) == training_state(resumed.at_load)
    if "local spec" not in name:
        assert_same_training_state(saved, resumed.at_load)  # with the settings of each parameter, by its name
    assert ("they start empty, as in a fresh model" in resumed.output) == (name in EMPTY)
    if begun < LAST:
        assert differing(separate(dump(results, source, LAST)), separate(dump(results, name, LAST))) == []


@pytest.mark.parametrize("name", CONVERTED)
def test_stock_resumes_what_was_converted_to_the_other_layer_spec(results: Results, name: str, tmp_path: Path) -> None:
    """Equal in the live job, and offline, there and back to the names of the source's spec."""
    job, folder = CONVERTED[name], tmp_path
    source, resumed = results.job(job.source), results.job(name)
    assert resumed.said == []
    assert list(resumed.losses) == list(range(SAVED + 1, LAST + 1))
    assert differing(separate(source.at_save), separate(resumed.at_load)) == []
    assert training_state(source.at_save) == training_state(resumed.at_load)
    run = job.run(resumed.folder.parent)
    assert verify(run).sound
    assert compare(source.run, run).equal
    convert(run, folder / "back", TorchDist(transformer_impl=impl_of(source)))
    assert compare(source.run, folder / "back").equal
    if job.source != "nets":  # of which live models have whole what model space has in parts
        truth, found = assemble(source.at_save), everything_in(open_checkpoint(folder / "back"))
        assert found.keys() == truth.keys()
        assert differing(truth, found) == []


def test_legacy_files_of_gated_delta_nets_are_those_that_stock_writes(results: Results, tmp_path: Path) -> None:
    """There and back through model space, which has their projections and filters in parts."""
    run = results.job("nets in legacy, converted").run
    convert(run, tmp_path / "parts", TorchDist())
    convert(tmp_path / "parts", tmp_path / "back", Legacy(tensor_model_parallel_size=2, pipeline_model_parallel_size=2))
    for file in sorted(run.glob(f"iter_{LAST:07d}/mp_rank_*/*.pt")):
        stock, ours = (
            torch.load(root / file.relative_to(run), weights_only=False) for root in (run, tmp_path / "back")
        )
        if "model" in stock:
            models = [
                {key: value for key, value in state["model"].items() if "_extra_state" not in key}
                for state in (stock, ours)
            ]
            assert stock["model"].keys() == ours["model"].keys()
            assert any("self_attention.in_proj.weight" in key for key in stock["model"])
            stock, ours = models
            assert list(stock) == list(ours), file
        torch.testing.assert_close(ours, stock, rtol=0, atol=0, equal_nan=True)


def impl_of(job: Job) -> Any:
    return inspect(job.run).model["layer spec"]


@pytest.mark.parametrize("name", BUILT)
def test_the_stand_in_takes_and_writes_what_a_build_does(results: Results, name: str) -> None:
    fixture, resumed = fixture_named(name), results.job(name)
    assert differing(fixture.truth, assemble(resumed.at_load)) == []
    of_build, own = (open_checkpoint(run).files.index() for run in (fixture.run, resumed.run))
    assert {key: (array.shape, array.dtype) for key, array in of_model(of_build)} == {
        key: (array.shape, array.dtype) for key, array in of_model(own)
    }
    states = [sorted(key for key in one.objects if "_extra_state" in key) for one in (of_build, own)]
    assert states[0] == states[1]


def of_model(index: Any) -> Iterator[tuple[str, Any]]:
    arrays = index.arrays.items()
    return ((key, array) for key, array in arrays if not key.startswith(("optimizer", "chained")))


def of_the_optimizer(dumped: Path) -> dict[str, torch.Tensor]:
    return {name: values for name, values in assemble(dumped).items() if not name.startswith("weight.")}


def skip_where_torch_cannot_read_them() -> None:
    if engine_version() < (2, 16):
        pytest.skip("torch's safe reader, and so stock Megatron, refuses what Transformer Engine 2.13 pickles")


@pytest.mark.parametrize("name", GATHERING)
def test_fp8_weights_that_are_stored_as_such(results: Results, name: str) -> None:
    """Transformer Engine pickles them as they are: bytes and a scale."""
    skip_where_torch_cannot_read_them()
    saved, resumed = results.job(GATHERING[name].source), results.job(name)
    assert differing(of_the_optimizer(saved.at_save), of_the_optimizer(resumed.at_load)) == []
    assert_same_training_state(saved.at_save, resumed.at_load)
    by_us = [line for line in resumed.said if "within fp8" in line]
    assert bool(by_us) == ("same layout" not in name)


@pytest.mark.parametrize("name", ["dense", "grouped", "latent", "predicting", "tensorwise", "blockwise", "microscaled"])
def test_offline(results: Results, name: str, tmp_path: Path) -> None:
    saved = results.job(name)
    assert inspect(saved.run).model["layer spec"] == "transformer_engine"
    assert verify(saved.run).sound
    assert_converted(saved.run, assemble(saved.at_save), tmp_path, legacy=name != "predicting")


def test_multi_token_prediction_has_no_legacy_files(results: Results, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="found: parameters of mtp.layers; hint: use --to torch_dist"):
        convert(results.job("predicting").run, tmp_path / "out", Legacy())


@pytest.mark.parametrize("name", ["gathered", "first scale"])
def test_offline_fp8_weights_are_decoded(results: Results, name: str, tmp_path: Path) -> None:
    saved = results.job(name)
    checked = verify(saved.run)
    assert checked.sound
    assert any("within fp8 rounding of their weights" in check.extent for check in checked.checks)
    assert_converted(saved.run, assemble(saved.at_save), tmp_path)
