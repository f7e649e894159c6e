"""Tests Megatron-FSDP's `fsdp_dtensor`: read like any other format, and written as such a job requests it."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt_ext import Canonical, FsdpDtensor, HuggingFace, Legacy, TorchDist
from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.fsdp.names import ModuleNames, Stored, parameter_of
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.targets import Target
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.damage import without_digests

WRITTEN = "iter_0000004"
STATE = "optimizer.state.module.module.module."
# One source for each way of storing an optimizer, of naming modules, and of storing weights.
SOURCES = ("p02", "p06", "p08", "p09", "p21", "p22", "p31", "p41", "p42", "p45", "p50")


@pytest.fixture
def fsdp(tmp_path: Path) -> Fixture:
    return fixture_named("p50").copy_to(tmp_path / "copy")


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def by_torch(folder: Path, keys: list[str]) -> dict[str, Any]:
    """Read entries with torch's own reader."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype) if hasattr(entries[key], "size") else 0
        for key in keys
    }
    dcp.load(found, checkpoint_id=folder)
    return found


def test_inspection_of_fsdp_dtensor() -> None:
    found = inspect(fixture_named("p50").run)
    assert (found.format, found.writer.version) == ("fsdp_dtensor", "0.19")
    assert [(who.who, who.layouts) for who in found.resumptions] == [
        ("stock Megatron with --use-megatron-fsdp", "its own: TP1 x PP1 x DP4; another DP"),
        ("stock Megatron without it", "none"),
        ("Megatron with mcore_ckpt_ext, without it", "any"),
    ]
    assert {kind: found.bytes_by_kind[kind] for kind in ("fp32_param", "exp_avg")} == dict.fromkeys(
        ("fp32_param", "exp_avg"), 4 * 56000
    )
    assert "weight" not in found.bytes_by_kind
    checked = verify(fixture_named("p50").run)
    assert checked.sound
    (proof,) = (check.extent for check in checked.checks if check.name == "masters")
    assert proof == "56,000 masters, stored in place of the weights, which are their roundings"


@pytest.mark.thorough
@pytest.mark.parametrize("target", [TorchDist(), TorchDist(megatron_version="0.13.1"), Legacy(), Canonical()], ids=str)
def test_to_every_format(target: Target, tmp_path: Path) -> None:
    run = fixture_named("p50").run
    convert(run, tmp_path / "out", target)
    assert compare(run, tmp_path / "out").equal
    assert verify(tmp_path / "out").sound
    if not isinstance(target, Canonical):
        assert not open_checkpoint(tmp_path / "out").job.arguments().raw["use_megatron_fsdp"]
    convert(run, tmp_path / "hf", HuggingFace())
    assert compare(tmp_path / "hf", run).equal


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOURCES)
def test_from_every_format(name: str, tmp_path: Path) -> None:
    run = fixture_named(name).run
    report = convert(run, tmp_path / "out", FsdpDtensor(megatron_version="0.19.0"))
    assert "the state of the random generators is not converted: resume with --no-load-rng" in report.notes
    assert compare(run, tmp_path / "out").equal
    assert verify(tmp_path / "out").sound
    written = open_checkpoint(tmp_path / "out")
    assert (written.format.name, written.job.layout.pipeline) == ("fsdp_dtensor", 1)
    assert not written.files.unread()


def test_as_torch_reads_it(tmp_path: Path) -> None:
    """Names and halves are those that Megatron-FSDP requests; objects are unchanged."""
    fixture = fixture_named("p02")
    convert(fixture.run, tmp_path / "out", FsdpDtensor())
    fc1, name = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.input_layernorm.weight"
    keys = [f"model.module.{fc1}_{half}" for half in "wv"] + [f"{STATE}{fc1}_{half}.exp_avg" for half in "wv"]
    group = f"optimizer.param_to_group_meta.module.module.module.{name}."
    objects = ["iteration", "args", "opt_param_scheduler.num_steps", f"{group}wd_mult", f"{group}step", f"{group}betas"]
    found = by_torch(tmp_path / "out" / WRITTEN, [*keys, f"model.module.{name}", *objects])
    for kind, halves in (("fp32_param", keys[:2]), ("exp_avg", keys[2:])):
        assert torch.equal(torch.cat([found[half] for half in halves]), fixture.truth[f"{kind}.{fc1}"])
    fused = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    assert torch.equal(found[f"model.module.{name}"], fixture.truth[f"fp32_param.{fused}"])
    assert [found[key] for key in objects[2:]] == [32, 0.0, 4, (0.9, 0.999)]
    assert (found["iteration"], found["args"].ckpt_format, found["args"].use_megatron_fsdp) == (4, "fsdp_dtensor", True)


def test_experts_of_transformer_engine(tmp_path: Path) -> None:
    """Experts are numbered across the model in grouped linear layers, and have separate groups if the reader has."""
    fixture = fixture_named("p22")
    for expert in (1, 2):
        convert(fixture.run, tmp_path / str(expert), FsdpDtensor(expert_model_parallel_size=expert))
        key = "decoder.layers.1.mlp.experts.linear_fc2.weight3"
        place = f"optimizer.param_to_group_meta.module.module.module.{key}.is_expert_parallel"
        found = by_torch(tmp_path / str(expert) / WRITTEN, [f"model.module.{key}", place])
        name = "decoder.layers.1.mlp.experts.experts.3.linear_fc2.weight"
        assert torch.equal(found[f"model.module.{key}"], fixture.truth[f"fp32_param.{name}"])
        assert found[place] is (expert > 1)


def test_weights_alone(tmp_path: Path) -> None:
    """Weights are written in the masters' dtype, as such a job loads them."""
    run = fixture_named("p02").run
    convert(run, tmp_path / "out", FsdpDtensor(), drop=["optimizer"])
    written = open_checkpoint(tmp_path / "out")
    assert written.optimizer.format() is None
    assert compare(run, tmp_path / "out", kinds=["weight"]).equal
    convert(tmp_path / "out", tmp_path / "hf", HuggingFace())
    convert(tmp_path / "hf", tmp_path / "again", FsdpDtensor(transformer_impl="local"))
    assert compare(tmp_path / "hf", tmp_path / "again").equal


def test_possible_rounding_is_reported(tmp_path: Path) -> None:
    """Transformer Engine rounds exact ties differently from the conversion of masters to weights."""
    report = convert(fixture_named("p47").run, tmp_path / "out", FsdpDtensor())
    assert any(note.startswith("the weights are not written: ") for note in report.notes)
    assert compare(fixture_named("p47").run, tmp_path / "out", kinds=["fp32_param", "exp_avg"]).equal


def test_unsupported_optimizers_and_releases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=r"fsdp_dtensor.*lost|trains with Adam.*momentum_buffer"):
        convert(fixture_named("p43").run, tmp_path / "out", FsdpDtensor())
    with pytest.raises(UnsupportedCheckpointError, match=r"does not have this format.*0\.13.*0\.14 or later"):
        convert(fixture_named("p02").run, tmp_path / "out", FsdpDtensor(megatron_version="0.13.0"))


def test_a_half_that_is_missing(tmp_path: Path) -> None:
    convert(fixture_named("p02").run, tmp_path / "out", FsdpDtensor())
    gone = "model.module.decoder.layers.1.mlp.linear_fc1.weight_v"
    edit(without_digests(tmp_path / "out" / WRITTEN), lambda metadata: metadata.state_dict_metadata.pop(gone))
    with pytest.raises(UnreadableCheckpointError, match=r"halves that do not match.* and none; .*linear_fc1\.weight"):
        open_checkpoint(tmp_path / "out")
    assert not verify(tmp_path / "out").sound


def test_a_parameter_that_is_missing_or_twice(fsdp: Fixture) -> None:
    gone = "model.module.decoder.layers.1.mlp.linear_fc1.bias"
    kept: list[Any] = []
    edit(fsdp.iteration, lambda metadata: kept.append(metadata.state_dict_metadata.pop(gone)))
    with pytest.raises(
        UnreadableCheckpointError, match="state of a parameter that it does not contain.*linear_fc1.bias"
    ):
        open_checkpoint(fsdp.run)
    assert not verify(fsdp.run).sound
    edit(fsdp.iteration, lambda metadata: metadata.state_dict_metadata.update({gone: kept[0]}))

    def twice(metadata: Any) -> None:
        name = "model.module.decoder.final_layernorm.weight"
        metadata.state_dict_metadata["model.module.module.decoder.final_layernorm.weight"] = (
            metadata.state_dict_metadata[name]
        )
        for index, place in list(metadata.storage_data.items()):
            if index.fqn == name:
                metadata.storage_data[type(index)(name.replace("model.", "model.module."), index.offset)] = place

    edit(fsdp.iteration, twice)
    with pytest.raises(CheckpointError, match="two arrays are one parameter"):
        open_checkpoint(fsdp.run)


def test_an_unknown_key_is_named(fsdp: Fixture) -> None:
    def rename(metadata: Any) -> None:
        for table in (metadata.state_dict_metadata,):
            table["strange.thing"] = table.pop("rng_state.(0, 0).0.cuda_rng_state")
        for index in [index for index in metadata.storage_data if index.fqn.endswith("cuda_rng_state")]:
            metadata.storage_data[type(index)("strange.thing", index.offset)] = metadata.storage_data.pop(index)

    edit(fsdp.iteration, rename)
    assert {item.key: item.why for item in open_checkpoint(fsdp.run).files.unread()}["strange.thing"] == ""
    assert any(finding.where == "strange.thing" for finding in verify(fsdp.run).findings)


def test_names() -> None:
    job = open_checkpoint(fixture_named("p22").run).job.arguments()
    names = ModuleNames(job)
    for name in open_checkpoint(fixture_named("p22").run).names("weight"):
        assert parameter_of(f"module.module.module.{names.of(name)}", job) == Stored(name, None)
    grouped = "decoder.layers.0.mlp.experts.linear_fc1.weight12_v"
    assert parameter_of(grouped, job) == Stored("decoder.layers.0.mlp.experts.experts.12.linear_fc1.weight", 1)
    further = "mtp.layers.0.mtp_model_layer.self_attention.linear_proj.weight"
    expected = "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight"
    assert parameter_of(f"module.{further}", job) == Stored(expected, None)
    with pytest.raises(UnsupportedCheckpointError, match="MTP"):
        names.of(expected)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("setting", "shared", "said"),
    [
        ("lr", True, "records of .* overlap"),
        ("wd_mult", True, "records of .* overlap"),
        ("betas", False, r"lr_mult is \(0.9, 0.999\)"),
        ("is_decoupled_lr", False, "is_decoupled_lr is 1.0"),
    ],
)
def test_a_setting_read_from_the_place_of_another(setting: str, shared: bool, said: str, fsdp: Fixture) -> None:
    """What `verify` refuses by metadata, `convert` does not carry."""

    def exchange(metadata: Any) -> None:
        places = metadata.storage_data
        of_groups = [index for index in places if index.fqn.startswith("optimizer.param_to_group_meta")]
        one = next(index for index in of_groups if index.fqn.endswith(".lr_mult"))
        other = next(index for index in of_groups if index.fqn.endswith(f".{setting}"))
        taken = places[one]
        places[one] = places[other]
        if not shared:
            places[other] = taken

    edit(fsdp.iteration, exchange)
    assert any(re.search(said, finding.what) for finding in verify(fsdp.run).findings)
    for target in (TorchDist(), Canonical()):
        with pytest.raises(UnreadableCheckpointError, match=said):
            convert(fsdp.run, fsdp.run.parent / "out", target, dry_run=True)


def test_a_weight_read_from_the_place_of_a_moment(fsdp: Fixture) -> None:
    """A conversion that leaves the optimizer out does not take its bytes for weights."""

    def exchange(metadata: Any) -> None:
        places = metadata.storage_data
        weight = next(index for index in places if index.fqn.endswith("layers.0.self_attention.linear_qkv.weight"))
        moment = next(i for i in places if i.fqn.endswith(f"{weight.fqn.removeprefix('model.')}.exp_avg"))
        places[weight] = places[moment]

    edit(fsdp.iteration, exchange)
    for target, drop in ((HuggingFace(), []), (Canonical(), ["optimizer"])):
        with pytest.raises(UnreadableCheckpointError, match=r"records of .*weight.* and .*exp_avg overlap"):
            convert(fsdp.run, fsdp.run.parent / "out", target, drop=drop, dry_run=True)
