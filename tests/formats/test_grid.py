"""Test the grids of stored parts: of an array's columns, and of each of its tensors."""

from __future__ import annotations

import random

import pytest

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.grid import full_grid, known_grid, weight_grid
from mcore_ckpt_ext.formats.torch_dist.stacked_weights import StackedWeights
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.storage.index_entries import StoredArray, StoredChunk
from tests.harness.checkpoints import fixture_named

KEY = "decoder.layers.mlp.experts.experts.linear_fc1.weight"  # layers and experts are stacked
SHAPE = (2, 4, 6, 5)
CUTS = ((0, 1), (0, 2), (0, 2, 3), (0,))
Part = tuple[tuple[int, ...], tuple[int, ...]]


def cells() -> list[Part]:
    """Return the offsets and sizes of a grid's cells, in no order."""
    parts: list[Part] = [((), ())]
    for begins, end in zip(CUTS, SHAPE, strict=True):
        spans = zip(begins, (*begins[1:], end), strict=True)
        ends = [(begin, stop - begin) for begin, stop in spans]
        parts = [((*offsets, begin), (*sizes, size)) for offsets, sizes in parts for begin, size in ends]
    random.Random(7).shuffle(parts)
    return parts


def weights_of(parts: list[Part]) -> StackedWeights:
    chunks = [StoredChunk(offsets, sizes, RawArray("file", 0, 99, "float32", 9)) for offsets, sizes in parts]
    return StackedWeights({KEY: StoredArray(KEY, SHAPE, "float32", chunks)})


def grid_of_parts(parts: list[Part]) -> object:
    columns = [list(zip(*column, strict=True)) for column in zip(*parts, strict=True)]
    return full_grid(SHAPE, list(zip(*columns, strict=True)))


def test_a_tensor_has_the_grid_of_its_array() -> None:
    weights = weights_of(cells())
    assert grid_of_parts(cells()) == CUTS
    assert len(weights.names()) == 8
    for name in weights.names():
        assert known_grid(weights, name) == CUTS[2:]
        stored = {stored.slice.regions[0].offsets for stored in weights.stored_slices(WEIGHT, name)}
        assert stored == {(0, 0), (2, 0), (3, 0)}


def damaged(number: int, offsets: tuple[int, ...] | None = None, sizes: tuple[int, ...] | None = None) -> list[Part]:
    parts = cells()
    parts[number] = (offsets or parts[number][0], sizes or parts[number][1])
    return parts


@pytest.mark.parametrize(
    "parts",
    [
        cells()[1:],
        [*cells(), cells()[0]],
        damaged(3, offsets=cells()[4][0], sizes=cells()[4][1]),
        damaged(3, sizes=(1, 2, 1, 4)),
        damaged(3, sizes=(1, 2, 1, 6)),
        [(offsets, sizes) for offsets, sizes in cells() if offsets[2] > 0],
        [(offsets, sizes) for offsets, sizes in cells() if offsets[2] < 3],
        [],
    ],
    ids=["missing", "twice", "another twice", "short", "long", "without the first", "without the last", "none"],
)
def test_other_parts_are_no_grid(parts: list[Part]) -> None:
    assert grid_of_parts(parts) is None if parts else full_grid(SHAPE, [((), ())] * len(SHAPE)) is None
    weights = weights_of(parts)
    assert {known_grid(weights, name) for name in weights.names()} <= {None}


@pytest.mark.parametrize("number", ["p01", "p10", "p41"])
def test_grids_of_real_checkpoints_are_those_of_their_slices(number: str) -> None:
    weights = open_checkpoint(fixture_named(number).run).model.weights()
    assert isinstance(weights, StackedWeights)
    for name in weights.names():
        regions = [stored.slice.regions[0] for stored in weights.stored_slices(WEIGHT, name)]
        grid = tuple(tuple(sorted(set(axis))) for axis in zip(*(region.offsets for region in regions), strict=True))
        assert weight_grid(weights, name) == known_grid(weights, name) == grid
