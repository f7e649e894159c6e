"""Test loads by Megatron's ShardedTensors: other slices than saved, padding, holes, unknown kinds.

`jobs/test_fast_load.py` tests live loads; here the checkpoint's own tensors are the reference.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt_ext.errors import ModelMismatchError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.stored_arrays import StoredArrays
from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint
from mcore_ckpt_ext.megatron.live.sharded_load import ShardedLoad, missing_extra_states, unsupported_reason
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.planning.array_location import ArchivedTensor
from mcore_ckpt_ext.planning.overlap import Overlaps, Piece, overlap
from mcore_ckpt_ext.storage.index_entries import StoredArray, StoredChunk
from mcore_ckpt_ext.storage.torch_archive import TorchArchive
from mcore_ckpt_ext.storage.zip_directory import plain_directory
from tests.harness.checkpoints import fixture_named

EMBEDDING = "embedding.word_embeddings.weight"
LAYERS = "decoder.layers.mlp.linear_fc2.weight"  # four layers of 32 x 128, stacked


@dataclass
class RequestedTensors:
    """The fields of megatron.core.dist_checkpointing.mapping.ShardedTensor that count."""

    key: str
    data: torch.Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def init_data(self, device: str) -> None:
        self.data = torch.empty(self.local_shape, dtype=self.dtype, device=device)


@pytest.fixture
def checkpoint() -> TorchDistCheckpoint:
    found = open_checkpoint(fixture_named("p10").run).format.reader
    assert isinstance(found, TorchDistCheckpoint)
    return found


def rows(first: int, count: int, total: int = 128, **more: Any) -> RequestedTensors:
    return RequestedTensors(EMBEDDING, None, torch.bfloat16, (count, 32), (total, 32), (first, 0), **more)


def loaded(asked: Sequence[Any], checkpoint: TorchDistCheckpoint) -> list[torch.Tensor]:
    assert unsupported_reason(asked, checkpoint) is None
    return ShardedLoad(asked, checkpoint).read()


def test_any_part_of_an_array_can_be_asked_for(checkpoint: TorchDistCheckpoint) -> None:
    truth = checkpoint.view.tensor("weight", EMBEDDING).read()
    assert torch.equal(loaded([rows(16, 40)], checkpoint)[0], truth[16:56])
    columns = RequestedTensors(
        EMBEDDING, torch.zeros(128, 8, dtype=torch.bfloat16), torch.bfloat16, (128, 8), (128, 32), (0, 24)
    )
    (found,) = loaded([columns], checkpoint)
    assert torch.equal(found, truth[:, 24:])
    assert columns.data is not None
    assert found.data_ptr() == columns.data.data_ptr()


def test_a_layer_of_a_stacked_array(checkpoint: TorchDistCheckpoint) -> None:
    layer = RequestedTensors(LAYERS, None, torch.bfloat16, (16, 64), (4, 32, 128), (2, 16, 64), prepend_axis_num=1)
    truth = checkpoint.view.tensor("weight", "decoder.layers.2.mlp.linear_fc2.weight").read()
    assert torch.equal(loaded([layer], checkpoint)[0], truth[16:, 64:])


def test_other_dtypes_and_memory_that_is_not_contiguous(checkpoint: TorchDistCheckpoint) -> None:
    """Megatron copies, and so converts."""
    truth = checkpoint.view.tensor("weight", EMBEDDING).read()
    memory = torch.nn.Parameter(torch.zeros(32, 128))
    asked = RequestedTensors(EMBEDDING, memory.t(), torch.float32, (128, 32), (128, 32), (0, 0))
    loaded([asked], checkpoint)
    assert torch.equal(memory.detach(), truth.float().t())


def test_rows_of_padding_become_zero(checkpoint: TorchDistCheckpoint) -> None:
    truth = checkpoint.view.tensor("weight", EMBEDDING).read()
    memory = torch.full((64, 32), 7.0, dtype=torch.bfloat16)
    padded = replace(rows(100, 64, 256, allow_shape_mismatch=True), data=memory)
    loaded([padded], checkpoint)
    assert torch.equal(memory, torch.cat([truth[100:], torch.zeros(36, 32, dtype=torch.bfloat16)]))


class Quantized(torch.Tensor):
    """Not a plain tensor."""


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (replace(rows(0, 128), key="unheard.of"), "unheard.of is not in the checkpoint"),
        (rows(0, 128, 256), r"of shape \(256, 32\), in the checkpoint of \(128, 32\)"),
        (rows(100, 64), "beyond its end"),
        (rows(0, 128, flattened_range=slice(0, 4)), "flattened"),
        (replace(rows(0, 128), dtype=torch.complex64), "complex64"),
        (replace(rows(0, 128), data=torch.empty(128, 32).as_subclass(Quantized)), "Quantized"),
        (replace(rows(0, 128), data=torch.empty(128, 32, dtype=torch.bfloat16, device="meta")), "device meta"),
        (replace(rows(0, 128), data=torch.empty(128, 32)), "described as .*, and its data is torch.float32"),
    ],
)
def test_unsupported_requests_are_named(asked: RequestedTensors, reason: str, checkpoint: TorchDistCheckpoint) -> None:
    found = unsupported_reason([rows(0, 128), asked], checkpoint)
    assert found is not None
    assert re.search(reason, found)


def with_chunks(checkpoint: TorchDistCheckpoint, chunks: Sequence[StoredChunk]) -> TorchDistCheckpoint:
    array = replace(checkpoint.index.arrays[EMBEDDING], chunks=tuple(chunks))
    checkpoint.__dict__["index"] = replace(checkpoint.index, arrays={**checkpoint.index.arrays, EMBEDDING: array})
    return checkpoint


def test_chunks_that_overlap_are_left_to_megatron(checkpoint: TorchDistCheckpoint) -> None:
    """How they are found, `offline/test_contradictions.py` sees."""
    assert unsupported_reason([rows(0, 128)], checkpoint) is None
    checkpoint.__dict__["index"] = replace(checkpoint.index, overlapping=frozenset([EMBEDDING]))
    assert unsupported_reason([rows(0, 128)], checkpoint) == f"the chunks of {EMBEDDING} overlap"


def test_a_hole_is_refused_before_anything_is_written(checkpoint: TorchDistCheckpoint) -> None:
    """Megatron would leave there what was in memory."""
    chunk = checkpoint.index.arrays[EMBEDDING].chunks[0]
    assert chunk.sizes == (128, 32)
    holed = with_chunks(checkpoint, [chunk._replace(sizes=(100, 32))])
    with pytest.raises(ModelMismatchError, match="does not contain every element"):
        ShardedLoad([rows(64, 64)], holed)


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[StoredChunk], Region]:
    """An array cut along each axis anywhere, and a part of it."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
    chunks = [((), ())]
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        spans = list(zip(cuts, cuts[1:], strict=False))
        chunks = [((*o, low), (*s, high - low)) for o, s in chunks for low, high in spans]
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    extent = ArchivedTensor("f", 0, 1, "float32", (1,))
    stored = [StoredChunk(o, s, extent._replace(offset=number)) for number, (o, s) in enumerate(chunks)]
    return shape, draw(st.permutations(stored)), Region("x", offsets, sizes)


@settings(max_examples=300)
@given(grids())
def test_the_chunks_of_a_part_are_found_and_no_others(
    problem: tuple[tuple[int, ...], list[StoredChunk], Region],
) -> None:
    shape, chunks, region = problem
    arrays = StoredArrays({"x": StoredArray("x", shape, "float32", tuple(chunks))})
    found = {stored.extent.offset for stored in arrays.stored_slices_in("array", region)}
    pieces = [Piece(Region("x", c.offsets, c.sizes), 0, Region("x", c.offsets, c.sizes).numel, 0) for c in chunks]
    needed = overlap(shape, Piece(region, 0, region.numel, 0), pieces)
    assert needed.missing == []
    assert found == {chunks[at].extent.offset for at, _ in needed.runs}


@settings(max_examples=200)
@given(grids(), st.integers(0, 5), st.integers(0, 5))
def test_a_remembered_overlap_is_moved_to_where_the_elements_lie(
    problem: tuple[tuple[int, ...], list[StoredChunk], Region], source_base: int, target_base: int
) -> None:
    shape, chunks, region = problem
    regions = [Region("x", chunk.offsets, chunk.sizes) for chunk in chunks[1:]]
    overlaps = Overlaps()
    for base in (0, source_base):
        pieces = [Piece(one, 0, one.numel, base + number) for number, one in enumerate(regions)]
        target = Piece(region, 0, region.numel, target_base)
        found, expected = overlaps.of(shape, target, pieces), overlap(shape, target, pieces)
        rows = [[(index, runs.rows()) for index, runs in one.runs] for one in (found, expected)]
        assert rows[0] == rows[1]
        assert (found.missing, found.missing_at) == (expected.missing, expected.missing_at)


@pytest.mark.parametrize("name", ["p01", "p06", "p07", "p10", "p41"])
def test_directories_are_as_the_standard_library_reads_them(name: str) -> None:
    checkpoint = open_checkpoint(fixture_named(name).run)
    for file, offset, length in sorted(set(checkpoint.files.archives())):
        archive = TorchArchive(checkpoint.files.reader, file, offset, length)
        found = plain_directory(archive._ends[-1][1], length)
        assert found is not None
        assert found.records == archive._records_by_zipfile()


def test_unusual_archives_are_left_to_the_standard_library(tmp_path: Any) -> None:
    def directory(**options: Any) -> Any:
        path = tmp_path / "archive.zip"
        comment, name = options.pop("comment", b""), options.pop("name", "a/b")
        with zipfile.ZipFile(path, "w", **options) as archive:
            archive.writestr(name, b"content " * 40)
            archive.comment = comment
        data = path.read_bytes()
        return lambda cut=0, more=0: plain_directory(data[cut:], len(data) + more)

    assert [member.filename for member in directory()().records] == ["a/b"]
    assert directory()(more=1) is None
    assert directory()(cut=400) is None
    assert directory(compression=zipfile.ZIP_DEFLATED)() is None
    assert directory(comment=b"said")() is None
    assert directory(name="\u00e4/b")() is None
    assert plain_directory(b"", 0) is None


def test_only_missing_extra_states_start_empty() -> None:
    """Those of another stacking are the module's own: to leave them out would forget its history of fp8."""
    layer, other = "decoder.layers.self_attention.linear_qkv._extra_state", "decoder.layers.mlp.linear_fc1._extra_state"
    of_one_layer = "decoder.layers.2.mlp.linear_fc1._extra_state/shard_0_1"
    stored = {f"{layer}/shard_1_4": None, of_one_layer: None, "rng/shard_0_1": None}
    checkpoint = SimpleNamespace(index=SimpleNamespace(objects=stored))

    def asked(key: str, offset: int) -> Any:
        return SimpleNamespace(key=key, global_offset=(offset,))

    own = [asked(layer, 1), asked(other, 2), asked("rng_state", 0)]
    missing = [asked(layer, 0), asked(other, 1), asked("decoder.final_layernorm._extra_state", 0)]
    assert missing_extra_states([*own, *missing], checkpoint) == missing
