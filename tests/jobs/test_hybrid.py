"""Test models of genuine Megatron-LM 0.19.2 with Mamba, attention and MLP layers, under other layouts.

The Mamba kernels run on GPUs only (see `ranks/hybrid_layers.py`), so the optimizer holds noise in place of trained
state, and the live optimizer after loading is compared with the one before saving, element by element.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext import Legacy, convert
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.layout.sidecar import FILE_NAME
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.cases import Case, load_all, save_noise
from tests.harness.checkouts import VARIABLE, only_for
from tests.harness.jobs import copy_of, differing
from tests.harness.layouts import Layout

pytestmark = pytest.mark.nightly

MIXER = ["--mamba-state-dim", "8", "--mamba-head-dim", "8", "--mamba-num-groups", "2", "--mamba-num-heads", "8"]
PLAIN = ["--position-embedding-type", "none", "--normalization", "RMSNorm", "--disable-bias-linear"]
PLAIN += ["--untie-embeddings-and-output-weights"]


def pattern(layers: str, stack: str = "hybrid_stack") -> list[str]:
    return [*MIXER, *PLAIN, "--spec", "hybrid_layers", stack, "--hybrid-layer-pattern", layers]


@pytest.mark.parametrize(
    ("source", "written", "target", "running"),
    [
        (Layout(2, 2, 4), "M*M-|M*", Layout(1, 1, 2), "M*M-M*"),
        (Layout(1, 1, 1), "M*M-M*", Layout(2, 2, 4), "M*|M-M*"),
    ],
    ids=["TP2 x PP2 to TP1 x PP1", "TP1 x PP1 to TP2 x PP2"],
)
def test_the_live_optimizer_equals_the_one_that_was_saved(
    source: Layout, written: str, target: Layout, running: str, tmp_path: Path
) -> None:
    run = save_noise(tmp_path / "saved", source, pattern(written))
    bare = copy_of(run, tmp_path / "bare")
    (bare / "iter_0000004" / FILE_NAME).unlink()
    cases = [Case("sidecar", run, dump=tmp_path / "sidecar"), Case("bare", bare, dump=tmp_path / "bare_dump")]
    if target.pipeline == 1:  # where patterns do not name stages, which legacy files count on
        convert(
            bare, tmp_path / "legacy", Legacy(tensor_model_parallel_size=target.tensor, pipeline_model_parallel_size=1)
        )
        options = {"ckpt_format": "torch", "no_load_rng": True}
        cases.append(Case("legacy", tmp_path / "legacy", options, dump=tmp_path / "legacy_dump"))
    outcomes = load_all(tmp_path / "job", target, cases, more=pattern(running), are_rehearsed=True)
    if target.pipeline == 1:
        assert [(rank["error"], rank["lines"]) for rank in outcomes["legacy"]] == [(None, [])] * target.ranks
    truth = assemble(tmp_path / "saved" / "dump" / "after_save_0000004")
    for name, witness in (("sidecar", "the sidecar"), ("bare", "the live model")):
        assert [rank["error"] for rank in outcomes[name]] == [None] * target.ranks
        assert f"placed by {witness})" in outcomes[name][0]["lines"][0]
    assert differing(truth, assemble(tmp_path / "sidecar")) == []
    assert differing(truth, assemble(tmp_path / "bare_dump")) == []
    if target.pipeline == 1:  # by stock Megatron, from files for its own layout
        assert differing(truth, assemble(tmp_path / "legacy_dump")) == []
    assert verify(bare).sound
    whole = open_checkpoint(bare)
    for kind in whole.kinds():
        assert all(whole.tensor(kind, name).read().numel() for name in whole.names(kind))


@only_for("0.20")
def test_gated_delta_products_are_resumed_under_another_layout(tmp_path: Path) -> None:
    """Their projections and filters are stored in parts, one for each Householder update."""
    stack, job = "stack_of_products", {"megatron": Path(os.environ[VARIABLE])}
    run = save_noise(tmp_path / "saved", Layout(2, 2, 4), pattern("M*M-|M*", stack), **job)
    bare = copy_of(run, tmp_path / "bare")
    (bare / "iter_0000004" / FILE_NAME).unlink()
    cases = [Case("sidecar", run, dump=tmp_path / "sidecar"), Case("bare", bare, dump=tmp_path / "bare_dump")]
    outcomes = load_all(tmp_path / "job", Layout(1, 1, 2), cases, more=pattern("M*M-M*", stack), **job)
    truth = assemble(tmp_path / "saved" / "dump" / "after_save_0000004")
    for name, dump in (("sidecar", "sidecar"), ("bare", "bare_dump")):
        assert [rank["error"] for rank in outcomes[name]] == [None, None]
        assert differing(truth, assemble(tmp_path / dump)) == []
    assert verify(bare).sound


def test_a_hybrid_model_goes_on_from_a_gpt(tmp_path: Path) -> None:
    """Two layers of a GPT are halves of four of its layers; the Mamba layers have their own weights and no moments."""
    run = save_noise(tmp_path / "saved", Layout(2, 2, 4), [*PLAIN, "--num-layers", "2"])
    bare = copy_of(run, tmp_path / "bare")
    (bare / "iter_0000004" / FILE_NAME).unlink()
    cases = [Case("sidecar", run, dump=tmp_path / "sidecar"), Case("bare", bare, dump=tmp_path / "bare_dump")]
    cases += [Case("uneven", run, {"hybrid_layer_pattern": "M*-M--"})]
    outcomes = load_all(tmp_path / "job", Layout(1, 1, 2), cases, more=pattern("M*-M*-", "stack_after_gpt"))
    truth = assemble(tmp_path / "saved" / "dump" / "after_save_0000004")
    for name, folder in (("sidecar", "sidecar"), ("bare", "bare_dump")):
        assert [rank["error"] for rank in outcomes[name]] == [None, None]
        assert "elements that the checkpoint's model does not have: newly initialized" in outcomes[name][0]["lines"][0]
        alive = assemble(tmp_path / folder)
        new = {key: alive.pop(key) for key in list(alive) if ".layers.0." in key or ".layers.3." in key}
        assert all(not tensor.any() for key, tensor in new.items() if key.startswith("exp_avg"))
        weights = {key.partition(".")[2]: tensor for key, tensor in new.items() if key.startswith("weight.")}
        assert len(weights) > 10
        assert all(torch.equal(new[f"fp32_param.{name}"], weights[name].float()) for name in weights)
        assert differing(truth, {in_gpt(key): tensor for key, tensor in alive.items()}) == []
    assert all("cannot be loaded into a hybrid model" in rank["error"] for rank in outcomes["uneven"])
    assert all(rank["before"] == rank["after"] for rank in outcomes["uneven"])


def in_gpt(key: str) -> str:
    """The name that a tensor of the layers `M*-M*-` has in the GPT."""
    for own, number in ((1, 0), (2, 0), (4, 1), (5, 1)):
        if f".layers.{own}." in key:
            return key.replace(f".layers.{own}.", f".layers.{number}.")
    return key.replace("decoder.final_norm", "decoder.final_layernorm")
