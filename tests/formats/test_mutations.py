"""Tests mutations that keep all files and sizes valid: none is accepted.

Moments of another state cannot be detected by the master check, which is shown as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.checkpoint import Checkpoint, open_checkpoint
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, FP32_PARAM, PARAM_REMAINDER, WEIGHT
from mcore_ckpt_ext.optimizers.description import MOMENTUM
from mcore_ckpt_ext.planning.plan import StoredSlice
from tests.harness.checkpoints import Fixture, fixture_named, part_of

FORMATS = ["p01", "p02", "p04", "p05", "p06", "p07", "p41", "p43", "p44", "p45", "p46", "p48"]
LAYER = "decoder.layers"


def write(checkpoint: Checkpoint, stored: StoredSlice, values: torch.Tensor) -> None:
    """Write other values to a stored slice on disk."""
    payload = checkpoint.files.transfer.locate(stored.extent)
    with (checkpoint.files.folder / payload.file).open("r+b") as file:
        file.seek(payload.offset + stored.first * payload.dtype.itemsize)
        file.write(values.to(payload.dtype.torch).contiguous().view(torch.uint8).numpy().tobytes())


def rewrite(fixture: Fixture, kind: str, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace the values of every tensor of a kind, slice by slice, by `change` of the old global values."""
    checkpoint = open_checkpoint(fixture.run)
    changed = {name: change(name, fixture.truth[f"{kind}.{name}"]) for name in checkpoint.names(kind)}
    for name, values in changed.items():
        for stored in checkpoint.stored_slices(kind, name):
            write(checkpoint, stored, part_of(values, stored.slice))


def read_all(fixture: Fixture) -> None:
    checkpoint = open_checkpoint(fixture.run)
    for kind in checkpoint.kinds():
        for name in checkpoint.names(kind):
            checkpoint.tensor(kind, name).read()


@pytest.fixture(params=FORMATS)
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Fixture:
    """Return a private copy of a checkpoint of each optimizer format."""
    return fixture_named(request.param).copy_to(tmp_path / "copy")


def test_a_rewrite_without_a_change_is_no_mutation(copied: Fixture) -> None:
    """Negative control: `rewrite` writes the same values."""
    rewrite(copied, FP32_PARAM, lambda name, values: values)
    read_all(copied)


@pytest.mark.parametrize("suffix", ["self_attention.linear_proj.weight", "mlp.linear_fc2.weight"])
def test_two_exchanged_parameters(copied: Fixture, suffix: str) -> None:
    pair = [f"{LAYER}.{layer}.{suffix}" for layer in (0, 1)]
    other = dict(zip(pair, reversed(pair), strict=True))
    truth = copied.truth
    rewrite(copied, FP32_PARAM, lambda name, values: truth[f"{FP32_PARAM}.{other.get(name, name)}"])
    with pytest.raises(CheckpointError):
        read_all(copied)


def test_masters_shifted_by_64_elements(copied: Fixture) -> None:
    rewrite(copied, FP32_PARAM, lambda name, values: values.reshape(-1).roll(64).reshape(values.shape))
    with pytest.raises(CheckpointError):
        read_all(copied)


def test_two_exchanged_tensor_parallel_ranks(tmp_path: Path) -> None:
    fixture = fixture_named("p02").copy_to(tmp_path / "copy")
    checkpoint = open_checkpoint(fixture.run)

    def exchanged(name: str, values: torch.Tensor) -> torch.Tensor:
        grid = checkpoint.job.models().weights[name].grid
        axes = [axis for axis, offsets in enumerate(grid) if len(offsets) > 1]
        if not axes:
            return values
        halves = [chunk for half in values.chunk(len(grid[axes[0]]) // 2, axes[0]) for chunk in half.chunk(2, axes[0])]
        swapped = [part for pair in zip(halves[1::2], halves[::2], strict=True) for part in pair]
        return torch.cat(swapped, axes[0])

    rewrite(fixture, FP32_PARAM, exchanged)
    with pytest.raises(CheckpointError):
        read_all(fixture)


def test_moments_of_another_state_are_outside_of_the_proof(copied: Fixture) -> None:
    """Moments have no second copy to compare with, so they are read as they are, as documented."""
    name = f"{LAYER}.1.mlp.linear_fc1.weight"
    kind = EXP_AVG if f"{EXP_AVG}.{name}" in copied.truth else MOMENTUM
    rewrite(copied, kind, lambda name, values: values + 1)
    read_all(copied)
    assert torch.equal(open_checkpoint(copied.run).tensor(kind, name).read(), copied.truth[f"{kind}.{name}"] + 1)


@pytest.mark.parametrize(("name", "kind"), [("p42", WEIGHT), ("p47", PARAM_REMAINDER), ("p47b", PARAM_REMAINDER)])
def test_so_are_masters_that_have_no_rounded_copy(name: str, kind: str, tmp_path: Path) -> None:
    """In fp32, weights are the masters; any remainder fits any weight."""
    fixture = fixture_named(name).copy_to(tmp_path / "copy")
    pair = [f"{LAYER}.{layer}.self_attention.linear_proj.weight" for layer in (0, 1)]
    other = dict(zip(pair, reversed(pair), strict=True))
    truth = fixture.truth
    rewrite(fixture, kind, lambda name, values: truth[f"{kind}.{other.get(name, name)}"])
    read_all(fixture)
    checkpoint = open_checkpoint(fixture.run)
    assert torch.equal(checkpoint.tensor(kind, pair[0]).read(), truth[f"{kind}.{pair[1]}"])
