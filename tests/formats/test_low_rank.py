"""Tests that any slice of a merged weight equals that of the whole, for all blocks and layouts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt_ext.formats.low_rank import Merged, Part
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT, LogicalTensor
from mcore_ckpt_ext.planning.plan import StoredSlice, TargetSlice

ROWS, COLUMNS, RANK = 8, 5, 2
# Integers, whose sums are exact.
TENSORS = {
    "weight": torch.randint(-4, 5, (ROWS, COLUMNS)).float(), "a": torch.randint(-4, 5, (RANK, COLUMNS)).float(),
    "b": torch.randint(-4, 5, (ROWS, RANK)).float(), "m": torch.rand(ROWS),
}  # fmt: skip


class Memory:
    """A source of tensors in memory."""

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor:
        return LogicalTensor(name, tuple(TENSORS[name].shape), "float32")

    def stored_slices(self, kind: str, name: str) -> Sequence[StoredSlice]:
        return []


def cut(tensor: torch.Tensor, wanted: Slice) -> torch.Tensor:
    found = []
    for region in wanted.regions:
        place = tuple(slice(at, at + size) for at, size in zip(region.offsets, region.sizes, strict=True))
        found.append(tensor[place].reshape(-1))
    return torch.cat(found)[wanted.start : wanted.stop]


def merged(whole: torch.Tensor, magnitudes: bool) -> tuple[torch.Tensor, Merged]:
    """Return a merged weight of rows 1 to 3 and 5 to 7; the latter come first in B."""
    parts, truth = [], whole.clone()
    for first, count, row in ((5, 3, 0), (1, 3, 4)):
        parts.append(Part(first, count, "a", ("b", row), ("m", row) if magnitudes else None, 0.5))
        rows = whole[first : first + count] + 0.5 * (TENSORS["b"][row : row + count] @ TENSORS["a"])
        if magnitudes:
            rows = (TENSORS["m"][row : row + count] / torch.linalg.norm(rows, dim=1)).view(-1, 1) * rows
        truth[first : first + count] = rows
    return truth, Merged(Memory(), Memory(), parts)


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    regions = []
    for _ in range(draw(st.integers(1, 3))):
        row, column = draw(st.integers(0, ROWS - 1)), draw(st.integers(0, COLUMNS - 1))
        sizes = (draw(st.integers(1, ROWS - row)), draw(st.integers(1, COLUMNS - column)))
        regions.append(Region("weight", (row, column), sizes))
    numel = sum(region.numel for region in regions)
    start = draw(st.integers(0, numel - 1))
    return Slice(tuple(regions), start, draw(st.integers(start + 1, numel)))


@pytest.mark.parametrize("magnitudes", [False, True])
@given(wanted=slices())
def test_a_slice_is_that_of_the_whole(wanted: Slice, magnitudes: bool) -> None:
    truth, derivation = merged(TENSORS["weight"], magnitudes)
    asked = TargetSlice(WEIGHT, wanted, {"weight": Memory().logical_tensor(WEIGHT, "weight")})
    inputs = [cut(TENSORS[one.slice.regions[0].name], one.slice) for _, one in derivation.inputs(asked)]
    found = derivation.values(asked, inputs)
    assert torch.allclose(found, cut(truth, wanted), rtol=1e-6, atol=1e-7, equal_nan=True)
