"""Tests `torch_dcp`, the format of jobs with `--use-torch-fsdp2`: read like any other, and converted."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext import Canonical, FsdpDtensor, Legacy, TorchDist
from mcore_ckpt_ext.errors import ProofError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.targets import Target
from tests.harness.checkpoints import Fixture, fixture_named

MASTER = "optimizer.fp32_from_fp16_params"
MOMENT = "optimizer.optimizer.state"


@pytest.fixture
def fsdp2(tmp_path: Path) -> Fixture:
    return fixture_named("p51").copy_to(tmp_path / "copy")


def edit(folder: Path, change: Callable[[dict[str, Any], dict[Any, Any]], None]) -> None:
    """Change arrays and their locations in the index."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata.state_dict_metadata, metadata.storage_data)
    path.write_bytes(pickle.dumps(metadata))


def test_experts_are_counted_from_zero(fsdp2: Fixture) -> None:
    def renamed(key: str) -> str:
        return key.replace(".mlp.", ".mlp.experts.local_experts.0.")

    def rename(arrays: dict[str, Any], places: dict[Any, Any]) -> None:
        entries = [(renamed(key), array) for key, array in arrays.items()]  # in the order of registration
        arrays.clear()
        arrays.update(entries)
        for place in [place for place in places if ".mlp." in place.fqn]:
            places[replace(place, fqn=renamed(place.fqn))] = places.pop(place)

    edit(fsdp2.iteration, rename)
    names = open_checkpoint(fsdp2.run).names("weight")
    assert "decoder.layers.0.mlp.experts.experts.0.linear_fc1.weight" in names
    assert not any(".experts.1." in name for name in names)


def test_inspection_of_torch_dcp() -> None:
    run = fixture_named("p51").run
    found = inspect(run)
    assert (found.format, found.optimizer_format) == ("torch_dcp", "no_distributed_optimizer")
    assert [(who.who, who.layouts) for who in found.resumptions] == [
        ("stock Megatron", "none"),
        ("Megatron with mcore_ckpt_ext, --use-torch-fsdp2", "TP1, any DP"),
        ("Megatron with mcore_ckpt_ext, without it", "any"),
    ]
    masters = sum(value.numel() for name, value in fixture_named("p51").truth.items() if name.startswith("fp32_param"))
    assert found.bytes_by_kind["weight"] * 2 == found.bytes_by_kind["exp_avg"] == 4 * masters
    checked = verify(run)
    assert checked.sound
    assert f"{masters:,} masters equal to their weights" in {check.extent for check in checked.checks}


@pytest.mark.thorough
@pytest.mark.parametrize("target", [TorchDist(), Legacy(), FsdpDtensor(), Canonical()], ids=str)
def test_to_every_format(target: Target, tmp_path: Path) -> None:
    run = fixture_named("p51").run
    report = convert(run, tmp_path / "out", target)
    assert compare(run, tmp_path / "out").equal
    assert verify(tmp_path / "out").sound
    assert report.proven_elements == open_checkpoint(run).job.arguments().num_layers * 12_704 + 9_280
    assert not open_checkpoint(tmp_path / "out").job.arguments().raw["use_torch_fsdp2"]


def test_masters_that_are_not_those_of_their_weights(fsdp2: Fixture, tmp_path: Path) -> None:
    """Masters of equal shape could be exchanged; the master check detects it."""

    def exchange(arrays: dict[str, Any], places: dict[Any, Any]) -> None:
        one, other = f"{MASTER}.0.2", f"{MASTER}.0.6"  # the output projections of the two layers
        taken = {key: place for key, place in places.items() if key.fqn in (one, other)}
        for key, place in taken.items():
            (swapped,) = [k for k in taken if k.fqn != key.fqn and k.offset == key.offset]
            places[swapped] = place

    edit(fsdp2.iteration, exchange)
    assert not verify(fsdp2.run).sound
    with pytest.raises(ProofError, match="linear_proj"):
        convert(fsdp2.run, tmp_path / "out", TorchDist())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        (f"{MASTER}.0.1", "no state for it|of shape"),
        ("model.decoder.final_layernorm.bias", "state of 3 further parameters"),
        ("optimizer.optimizer.param_groups.0.step", "counts steps per parameter"),
        ("optimizer.optimizer.param_groups.0.wd_mult", "0 groups that fit"),
    ],
)
def test_an_undecidable_case_is_refused(gone: str, reason: str, fsdp2: Fixture) -> None:
    edit(fsdp2.iteration, lambda arrays, places: arrays.pop(gone) and None)
    with pytest.raises(UnsupportedCheckpointError, match=reason):
        open_checkpoint(fsdp2.run)


def test_unknown_state_is_reported(fsdp2: Fixture) -> None:
    def add(arrays: dict[str, Any], places: dict[Any, Any]) -> None:
        for name, like in (("optimizer.mystery", f"{MASTER}.1.0"), ("mystery", "model.decoder.final_layernorm.bias")):
            arrays[name] = arrays[like]
            places |= {replace(key, fqn=name): place for key, place in places.items() if key.fqn == like}

    edit(fsdp2.iteration, add)
    unread = {item.key: item.kind for item in open_checkpoint(fsdp2.run).files.unread()}
    assert unread == {"rng_state": "other", "optimizer.mystery": "unknown", "mystery": "other"}
