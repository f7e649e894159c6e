"""Compare the overlap arithmetic with a plain numpy reference, on random shapes, regions and slices."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt_ext.errors import ModelMismatchError
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.array_location import ArchivedTensor
from mcore_ckpt_ext.planning.overlap import Piece, Runs, fold, overlap
from mcore_ckpt_ext.planning.plan import StoredSlice, TargetSlice, make_plan

Shape = tuple[int, ...]


@st.composite
def regions(draw: st.DrawFn, shape: Shape) -> Region:
    offsets, sizes = [], []
    for size in shape:
        first = draw(st.integers(0, size - 1))
        last = draw(st.integers(first + 1, size))
        whole = draw(st.booleans())
        offsets.append(0 if whole else first)
        sizes.append(size if whole else last - first)
    return Region("x", tuple(offsets), tuple(sizes))


@st.composite
def pieces(draw: st.DrawFn, shape: Shape) -> Piece:
    region = draw(regions(shape))
    start = draw(st.integers(0, region.numel - 1))
    stop = draw(st.integers(start + 1, region.numel))
    return Piece(region, start, stop, draw(st.integers(0, 9)))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Shape, Piece, list[Piece]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    return shape, draw(pieces(shape)), draw(st.lists(pieces(shape), max_size=4))


def flattened(shape: Shape, region: Region) -> numpy.ndarray:
    """Positions of a region's elements in the tensor's flattening, by numpy's own indexing."""
    positions = numpy.arange(int(numpy.prod(shape))).reshape(shape)
    window = tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))
    return positions[window].reshape(-1)


def copy(runs: Runs, source: numpy.ndarray, target: numpy.ndarray) -> None:
    """Execute runs one element at a time; no element may be written twice."""
    for first, at, length, count, source_stride, target_stride in runs.rows():
        for row in range(count):
            for column in range(length):
                place = at + row * target_stride + column
                assert target[place] == -1
                target[place] = source[first + row * source_stride + column]


@settings(max_examples=500)
@given(problems())
def test_every_element_comes_once_from_where_it_is(problem: tuple[Shape, Piece, list[Piece]]) -> None:
    shape, target, sources = problem
    expected = flattened(shape, target.region)[target.start : target.stop]
    memory = numpy.full(target.base + len(expected), -1)
    found = overlap(shape, target, sources)
    held: set[int] = set()
    for index, runs in found.runs:
        source = sources[index]
        stored = numpy.full(source.base + source.stop - source.start, -7)
        stored[source.base :] = flattened(shape, source.region)[source.start : source.stop]
        copy(runs, stored, memory)
    for source in sources:
        held.update(flattened(shape, source.region)[source.start : source.stop].tolist())
    for (low, high), at in zip(found.missing, found.missing_at, strict=True):
        assert not held & set(range(low, high))
        memory[at : at + high - low] = numpy.arange(low, high)
    assert memory[target.base :].tolist() == expected.tolist()


def test_a_column_shard_is_one_strided_run() -> None:
    whole = Piece(Region.whole("x", (1000, 64)), 0, 64_000, 0)
    shard = Piece(Region("x", (0, 16), (1000, 16)), 0, 16_000, 0)
    ((_, runs),) = overlap((1000, 64), shard, [whole]).runs
    assert runs.rows() == [(16, 0, 16, 1000, 64, 16)]


def test_neighbors_that_continue_each_other_are_joined() -> None:
    runs = fold(numpy.array([0, 4, 10]), numpy.array([7, 11, 20]), numpy.array([4, 6, 3]))
    assert runs.rows() == [(0, 7, 10, 1, 0, 0), (10, 20, 3, 1, 0, 0)]


class OneTensor:
    """A source with one stored tensor of 4 x 3."""

    def __init__(self, shape: Shape = (4, 3)) -> None:
        self.tensor = LogicalTensor("x", shape, "float32")

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        return self.tensor if name == "x" else None

    def stored_slices(self, kind: str, name: str) -> list[StoredSlice]:
        whole = Region.whole("x", self.tensor.shape)
        extent = ArchivedTensor("file", 0, 1, "float32", whole.sizes)
        return [StoredSlice(Slice.whole((whole,)), extent, 0)]


def wanted(name: str, shape: Shape, may_pad: bool = False) -> TargetSlice:
    tensor = LogicalTensor(name, shape, "float32")
    return TargetSlice("weight", Slice.whole((Region.whole(name, shape),)), {name: tensor}, may_pad)


def test_rows_of_padded_vocabulary_are_filled_and_surplus_rows_left_out() -> None:
    longer = make_plan([wanted("x", (6, 3), may_pad=True)], OneTensor())
    assert [(fill.start, fill.stop) for fill in longer.fills] == [(12, 18)]
    assert longer.bytes_read == 12 * 4
    shorter = make_plan([wanted("x", (2, 3), may_pad=True)], OneTensor())
    assert (shorter.fills, shorter.bytes_read) == ([], 6 * 4)


@pytest.mark.parametrize(
    ("want", "message"),
    [
        (wanted("y", (4, 3)), "has a parameter that the checkpoint lacks"),
        (wanted("x", (4, 5)), "different shapes in the model"),
        (wanted("x", (6, 3)), "different shapes in the model"),
        (wanted("x", (4, 6), may_pad=True), "different shapes in the model"),
    ],
)
def test_a_model_of_another_shape_is_refused(want: TargetSlice, message: str) -> None:
    with pytest.raises(ModelMismatchError, match=message):
        make_plan([want], OneTensor())


def test_a_hole_in_the_checkpoint_is_refused() -> None:
    class Holey(OneTensor):
        def stored_slices(self, kind: str, name: str) -> list[StoredSlice]:
            extent = ArchivedTensor("file", 0, 1, "float32", (5,))
            return [StoredSlice(Slice((Region.whole("x", (4, 3)),), 0, 5), extent, 0)]

    with pytest.raises(ModelMismatchError, match="elements 5 to 12"):
        make_plan([wanted("x", (4, 3), may_pad=True)], Holey())


def test_runs_outside_a_range_are_left_out() -> None:
    piece = Piece(Region("x", (0,), (8,)), 0, 8, 0)
    ((_, runs),) = overlap((8,), piece, [piece]).runs
    assert [len(runs.within(*limits)) for limits in ((0, 8), (2, 4), (8, 16))] == [1, 1, 0]
