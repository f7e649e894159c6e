"""Tests the legacy format: state of all ranks is combined, and invalid files are refused.

test_fixtures.py compares p08, p08b (distributed optimizer) and p08c (without) with the ground truth.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt_ext.errors import (
    CheckpointError,
    ModelMismatchError,
    PackingError,
    ProofError,
    UnreadableCheckpointError,
    UnsafePickleError,
    UnsupportedCheckpointError,
)
from mcore_ckpt_ext.formats.accounts import account_of
from mcore_ckpt_ext.formats.checkpoint import Checkpoint, open_checkpoint
from mcore_ckpt_ext.formats.legacy.reader import LegacyCheckpoint
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.local_parameters import TensorPart, model_space_name, regions_of
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.optimizers import remainders
from mcore_ckpt_ext.optimizers.legacy_masters import LegacyMasters
from mcore_ckpt_ext.optimizers.stale_masters import WHY_STALE
from mcore_ckpt_ext.transfer import read_slice
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.damage import flip, payload_position, read_all, verify_checksums

NORM = "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"
MATRIX = "decoder.layers.1.mlp.linear_fc1.weight"
EMBEDDINGS = "embedding.word_embeddings.weight"
LOCAL, ENGINE = {"transformer_impl": "local"}, {"transformer_impl": "transformer_engine"}


@pytest.fixture
def split(tmp_path: Path) -> Fixture:
    """Return a private copy of p08: TP2 x PP2 x DP2, tied embeddings, distributed optimizer."""
    return fixture_named("p08").copy_to(tmp_path / "p08")


@pytest.fixture
def plain(tmp_path: Path) -> Fixture:
    """Return a private copy of p08c: TP2, without distributed optimizer."""
    return fixture_named("p08c").copy_to(tmp_path / "p08c")


def opened(fixture: Fixture) -> Checkpoint:
    checkpoint = open_checkpoint(fixture.run)
    assert isinstance(checkpoint.format.reader, LegacyCheckpoint)
    return checkpoint


@pytest.mark.parametrize(("prefix", "norm_copies", "embedding_copies"), [("p08", 2, 2), ("p08b", 1, 2)])
def test_all_copies_of_a_weight_are_equal(prefix: str, norm_copies: int, embedding_copies: int) -> None:
    """Norms have a copy on every tensor-parallel rank, tied embeddings on the first and the last stage."""
    checkpoint = opened(fixture_named(prefix))
    for name in checkpoint.names("weight"):
        for copies in checkpoint.model.weights().copies("weight", name):
            read = [
                read_slice(_Alone(checkpoint, name, copy), checkpoint.files.transfer, "weight", copy.slice)
                for (copy,) in copies
            ]
            assert all(torch.equal(read[0], other) for other in read[1:]), name
    assert [len(copies) for copies in checkpoint.model.weights().copies("weight", NORM)] == [norm_copies]
    assert {len(copies) for copies in checkpoint.model.weights().copies("weight", EMBEDDINGS)} == {embedding_copies}


class _Alone:
    """A source with one stored slice."""

    def __init__(self, checkpoint: Checkpoint, name: str, stored: Any) -> None:
        self._tensor = checkpoint.logical_tensor("weight", name)
        self._stored = stored

    def logical_tensor(self, kind: str, name: str) -> Any:
        return self._tensor

    def stored_slices(self, kind: str, name: str) -> list[Any]:
        return [self._stored]


def test_an_iteration_folder_opens_like_its_run() -> None:
    fixture = fixture_named("p08b")
    assert open_checkpoint(fixture.iteration).job.layout == open_checkpoint(fixture.run).job.layout
    assert open_checkpoint(fixture.iteration).format.name == "torch"


def test_layers_are_counted_from_what_the_ranks_stored() -> None:
    assert opened(fixture_named("p08")).job.layers() == [[range(2)], [range(2, 4)]]
    assert opened(fixture_named("p08b")).job.layers() == [[range(n, n + 1)] for n in range(4)]


def test_every_archive_is_covered_by_the_checksums(split: Fixture) -> None:
    checkpoint = opened(split)
    assert len(list(checkpoint.files.archives())) == 8
    verify_checksums(checkpoint)
    flip(*payload_position(checkpoint, "exp_avg", MATRIX, 5))
    with pytest.raises(UnreadableCheckpointError, match="checksum differs"):
        verify_checksums(opened(split))


def test_a_flipped_byte_is_seen_by_the_proof(split: Fixture) -> None:
    flip(*payload_position(opened(split), "weight", MATRIX, 700))
    with pytest.raises(ProofError, match=f"{MATRIX}, element 700"):
        opened(split).tensor("exp_avg_sq", MATRIX).read()


def test_a_missing_rank_folder_is_named(split: Fixture) -> None:
    shutil.rmtree(split.iteration / "mp_rank_01_001")
    with pytest.raises(UnreadableCheckpointError, match="rank folders of its own layout"):
        opened(split).names("weight")


def test_a_rank_without_its_optimizer_state_is_no_whole_checkpoint(split: Fixture) -> None:
    (split.iteration / "mp_rank_01_001" / "distrib_optim.pt").unlink()
    with pytest.raises(ModelMismatchError, match="does not contain every element"):
        read_all(split.run)


def test_without_any_optimizer_state_the_weights_are_read(split: Fixture) -> None:
    for path in split.iteration.rglob("distrib_optim.pt"):
        path.unlink()
    checkpoint = opened(split)
    assert torch.equal(checkpoint.tensor("weight", MATRIX).read(), split.truth[f"weight.{MATRIX}"])
    with pytest.raises(UnreadableCheckpointError, match="holds no optimizer state"):
        checkpoint.names("exp_avg")


@pytest.mark.parametrize("file", ["model_optim_rng.pt", "distrib_optim.pt"])
def test_a_truncated_file_is_refused(file: str, split: Fixture) -> None:
    path = split.iteration / "mp_rank_01_000" / file
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UnreadableCheckpointError, match=f"mp_rank_01_000/{file}"):
        read_all(split.run)


def written(folder: Path, **state: Any) -> Path:
    """Write a checkpoint of one rank with a state."""
    (folder / "mp_rank_00").mkdir(parents=True)
    torch.save(state, folder / "mp_rank_00" / "model_optim_rng.pt")
    return folder


@pytest.mark.parametrize("state", [{"args": Namespace(), "checkpoint_version": 2.0}, {"checkpoint_version": 3.0}, {}])
def test_checkpoints_from_before_the_present_layout_are_refused(state: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="before Megatron-LM 2.6"):
        open_checkpoint(written(tmp_path, **state, model={})).job.layout  # noqa: B018 - looking is what is tested


def test_a_model_of_megatron_before_core_is_refused(tmp_path: Path) -> None:
    arguments = Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    folder = written(tmp_path, args=arguments, checkpoint_version=3.0, model={"language_model": {"encoder": {}}})
    with pytest.raises(UnsupportedCheckpointError, match="not a plain state dict"):
        open_checkpoint(folder).names("weight")


def test_parameters_without_a_rule_are_read_if_one_rank_holds_them(tmp_path: Path) -> None:
    arguments = Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    model = {"module.strange.matrix": torch.arange(6.0).reshape(2, 3)}
    checkpoint = open_checkpoint(written(tmp_path, args=arguments, checkpoint_version=3.0, model=model))
    assert torch.equal(checkpoint.tensor("weight", "strange.matrix").read(), model["module.strange.matrix"])
    assert checkpoint.kinds() == ("weight",)


def flip_exponent(fixture: Fixture, element: int) -> None:
    """Change a master so that its rounding changes."""
    path, position = payload_position(opened(fixture), "fp32_param", MATRIX, element)
    flip(path, position + 3)


def test_files_of_a_layer_wise_optimizer_are_named_and_refused(plain: Fixture) -> None:
    """The model's file then has the optimizer of the first data-parallel rank, and looks like a complete one."""
    (plain.iteration / "mp_rank_00" / "layer_wise_optimizer_1.pt").write_bytes(b"")
    with pytest.raises(UnsupportedCheckpointError, match="layer_wise_optimizer_1.pt.*--ckpt-format torch"):
        _ = open_checkpoint(plain.run).optimizer.state()


def test_a_changed_master_leaves_masters_over(plain: Fixture) -> None:
    flip_exponent(plain, 3)
    with pytest.raises(PackingError, match="masters or moments fit no weight"):
        opened(plain).names("fp32_param")


def test_a_master_changed_beyond_the_sample_is_seen_by_the_proof(plain: Fixture) -> None:
    flip_exponent(plain, 1000)
    with pytest.raises(ProofError, match=f"{MATRIX}, element 1000"):
        opened(plain).tensor("exp_avg", MATRIX).read()


def test_masters_of_a_gated_tower_have_the_rows_of_its_weights(plain: Fixture) -> None:
    """The arguments describe the language model, which has no gate."""
    tower = "vision_model.decoder.layers.0.mlp"
    for rank, path in enumerate(sorted(plain.iteration.glob("mp_rank_*/model_optim_rng.pt"))):
        state = torch.load(path, weights_only=False)
        optimizer = state["optimizer"]
        group = optimizer["optimizer"]["param_groups"][0]
        for number, (name, shape) in enumerate({"linear_fc1": (16, 4), "linear_fc2": (4, 8)}.items()):
            master = torch.arange(64.0 * number, 64.0 * number + prod(shape)).reshape(shape) + 100 * rank
            state["model"][f"{tower}.{name}.weight"] = master.bfloat16()
            optimizer["fp32_from_fp16_params"][0].append(master)
            group["params"].append(1000 + number)
            optimizer["optimizer"]["state"][1000 + number] = {"exp_avg": master.clone(), "exp_avg_sq": master.clone()}
        torch.save(state, path)
    read = opened(plain).tensor("fp32_param", f"{tower}.linear_fc1.weight").read()
    gate, up = range(8), range(8, 16)
    assert read[:, 0].tolist() == [4 * row + 100 * rank for rows in (gate, up) for rank in (0, 1) for row in rows]


@pytest.mark.parametrize("missing", ["fp32_from_fp16_params", "exp_avg_sq", "step"])
def test_an_optimizer_that_lacks_what_it_keeps_is_refused(missing: str) -> None:
    checkpoint = opened(fixture_named("p08c"))
    optimizer = checkpoint.format.reader._ranks[0].optimizers[0]  # type: ignore[attr-defined]
    groups, state = optimizer["optimizer"]["param_groups"], optimizer["optimizer"]["state"]
    for holder in (optimizer, *groups, *state.values()):
        holder.pop(missing, None)
    with pytest.raises(UnsupportedCheckpointError, match="not as Megatron's optimizers keep it"):
        checkpoint.optimizer.state()


def test_without_distributed_optimizer_the_groups_keep_their_step() -> None:
    checkpoint = opened(fixture_named("p08c"))
    assert isinstance(checkpoint.optimizer.state(), LegacyMasters)
    assert {(group["wd_mult"], group["step"]) for group in checkpoint.optimizer.param_groups()} == {(1.0, 4), (0.0, 4)}


def test_remainders_of_masters_are_gathered_as_numbers(split: Fixture) -> None:
    """So a job with `--use-precision-aware-optimizer` stores them: the gathered buffers are fp32."""
    for path in split.iteration.glob("*/distrib_optim.pt"):
        buffers = torch.load(path, weights_only=False)
        for state in buffers[0].values():
            state["param"] = remainders.split(state["param"])[1].float()
        torch.save(buffers, path)
    for path in split.iteration.glob("*/model_optim_rng.pt"):
        stored = torch.load(path, weights_only=False)
        stored["args"].use_precision_aware_optimizer = True
        torch.save(stored, path)
    checkpoint = opened(split)
    masters = {name: checkpoint.tensor("fp32_param", name).read() for name in checkpoint.names("fp32_param")}
    assert len(masters) == 52
    for name, master in masters.items():
        expected = split.truth[f"fp32_param.{name}"]
        is_tie = (expected.view(torch.int32) & 0xFFFF) == 0x8000  # that optimizer would have written the other weight
        assert torch.equal(master[~is_tie], expected[~is_tie]), name
        assert int(is_tie.sum()) < 5


def test_masters_of_fp32_weights_that_no_step_updated(split: Fixture) -> None:
    """So a precision-aware optimizer leaves them in fp32: the weights are the masters, and the copies are named."""
    for path in split.iteration.glob("*/distrib_optim.pt"):
        buffers = torch.load(path, weights_only=False)
        (state,) = buffers[0].values()
        torch.save({**buffers, 0: {(torch.float32, torch.float32): state}}, path)
    for path in split.iteration.glob("*/model_optim_rng.pt"):
        stored = torch.load(path, weights_only=False)
        stored["args"].use_precision_aware_optimizer = True
        stored["args"].bf16, stored["args"].params_dtype = False, torch.float32
        stored["model"] = {name: value if value is None else value.float() for name, value in stored["model"].items()}
        torch.save(stored, path)
    checkpoint = opened(split)
    for name in checkpoint.names("fp32_param"):
        assert torch.equal(checkpoint.tensor("fp32_param", name).read(), split.truth[f"weight.{name}"].float())
    account = account_of(checkpoint)
    assert [item.key for item in account.not_looked_at if item.why == WHY_STALE] == [
        "0.0.(torch.float32, torch.float32).param"
    ]


class _Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return torch._tensor._rebuild_from_type_v2, (print, torch.Tensor, ("attacked",), {})


def test_a_tensor_with_attributes_is_rebuilt_by_no_foreign_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path, args=Namespace(), checkpoint_version=3.0, model={"weight": _Attack()})
    with pytest.raises((UnsafePickleError, CheckpointError), match="print|unknown function"):
        open_checkpoint(folder).names("weight")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("local", "arguments", "name"),
    [
        ("decoder.layers.1.input_layernorm.bias", LOCAL, "decoder.layers.5.self_attention.linear_qkv.layer_norm_bias"),
        ("module.module.decoder.layers.0.pre_mlp_layernorm.weight", LOCAL,
         "decoder.layers.4.mlp.linear_fc1.layer_norm_weight"),
        ("decoder.layers.0.input_layernorm.weight", ENGINE, "decoder.layers.4.input_layernorm.weight"),
        ("decoder.layers.0.input_layernorm.weight", {**LOCAL, "multi_latent_attention": True},
         "decoder.layers.4.input_layernorm.weight"),
        ("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", LOCAL,
         "decoder.layers.4.mlp.experts.experts.3.linear_fc2.weight"),
        ("decoder.layers.0.mlp.experts.linear_fc1.bias1", ENGINE,
         "decoder.layers.4.mlp.experts.experts.3.linear_fc1.bias"),
        ("output_layer.weight", LOCAL, EMBEDDINGS),
        ("output_layer.weight", {"untie_embeddings_and_output_weights": True}, "output_layer.weight"),
    ],
)  # fmt: skip
def test_names_in_model_space(local: str, arguments: dict[str, Any], name: str) -> None:
    assert model_space_name(local, 4, 2, JobArguments.of(arguments)) == name


def test_fused_experts_are_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="GroupedMLP"):
        model_space_name("decoder.layers.0.mlp.experts.weight1", 0, 0, JobArguments.of(ENGINE))


def bands(name: str, shape: tuple[int, ...], **arguments: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Return the whole shape, and (offsets, sizes) of the part of rank 1 of 2."""
    whole, regions = regions_of(name, shape, TensorPart(1, 2), JobArguments.of(arguments))
    assert all(isinstance(region, Region) and region.name == name for region in regions)
    return whole, [(region.offsets, region.sizes) for region in regions]


@pytest.mark.parametrize(
    ("suffix", "shape", "whole", "held"),
    [
        ("self_attention.linear_qkv.weight", (6, 4), (12, 4), [((6, 0), (6, 4))]),
        ("self_attention.linear_qkv.bias", (6,), (12,), [((6,), (6,))]),
        ("self_attention.linear_proj.weight", (4, 2), (4, 4), [((0, 2), (4, 2))]),
        ("self_attention.linear_proj.bias", (4,), (4,), [((0,), (4,))]),
        ("self_attention.linear_qkv.layer_norm_weight", (4,), (4,), [((0,), (4,))]),
        ("mlp.linear_fc1.layer_norm_weight", (4,), (4,), [((0,), (4,))]),
        ("mlp.router.weight", (8, 4), (8, 4), [((0, 0), (8, 4))]),
        ("mlp.shared_experts.gate_weight", (1, 4), (1, 4), [((0, 0), (1, 4))]),
    ],
)
def test_rows_of_a_tensor_parallel_rank(
    suffix: str, shape: tuple[int, ...], whole: tuple[int, ...], held: list[Any]
) -> None:
    for swiglu in (False, True):
        assert bands(f"decoder.layers.0.{suffix}", shape, swiglu=swiglu) == (whole, held)


def test_a_gated_linear_is_held_as_rows_of_the_gate_and_rows_of_the_up_projection() -> None:
    gated = [((3, 0), (3, 4)), ((9, 0), (3, 4))]
    assert bands("decoder.layers.0.mlp.linear_fc1.weight", (6, 4), swiglu=True) == ((12, 4), gated)
    assert bands("decoder.layers.0.mlp.linear_fc1.weight", (6, 4)) == ((12, 4), [((6, 0), (6, 4))])


def test_a_down_projection_is_cut_where_it_is_smaller_than_the_rank() -> None:
    name = "decoder.layers.0.self_attention.linear_q_down_proj.weight"
    assert bands(name, (16, 4), q_lora_rank=16) == ((16, 4), [((0, 0), (16, 4))])
    assert bands(name, (8, 4), q_lora_rank=16) == ((16, 4), [((8, 0), (8, 4))])


@pytest.mark.parametrize("name", ["decoder.layers.0.mixer.in_proj.weight", "strange", "router_gate.scale"])
def test_a_parameter_without_a_rule_is_refused_if_it_may_be_split(name: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="tensor-parallel split of a parameter is unknown"):
        bands(name, (4, 4))
    assert regions_of(name, (4, 4), TensorPart(0, 1), JobArguments()) == ((4, 4), (Region.whole(name, (4, 4)),))
