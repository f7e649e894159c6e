"""Test that indexes of large checkpoints are read by the fast parser; the full one would refuse their size."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError
from mcore_ckpt_ext.formats.distcp_files import Array, Chunk, DistcpFiles
from mcore_ckpt_ext.megatron.shared_index import read_index_once, share_index
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.array_location import ArchivedTensor
from mcore_ckpt_ext.planning.plan import TargetSlice
from mcore_ckpt_ext.storage import dcp_index, safe_pickle
from mcore_ckpt_ext.storage.dcp_index import FolderIndex, SharedIndex, read_index
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex
from mcore_ckpt_ext.storage.index_entries import ChunkTable, StoredArray, StoredChunk
from tests.harness.checkpoints import fixture_named

Damage = Callable[[dcp.Metadata], None]

# A gradient buffer of one bucket, beyond 2**31 elements, in so many pieces.
PIECES, PIECE = 4000, 1 << 20
FEW = 20


def by_torch(pieces: int = PIECES) -> bytes:
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    chunks = []
    for number in range(pieces):
        offsets, sizes = torch.Size((number * PIECE,)), torch.Size((PIECE,))
        chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
        place = torch.distributed.checkpoint.filesystem._StorageInfo("__0_0.distcp", number * 5 * PIECE, 5 * PIECE)
        places[dcp.MetadataIndex("buffer", offsets, number)] = place
    properties = dcp.TensorProperties(torch.float32)
    entries["buffer"] = dcp.TensorStorageMetadata(properties, torch.Size((pieces * PIECE,)), chunks)
    return pickle.dumps(dcp.Metadata(entries, None, places))


def by_this_package(pieces: int = PIECES) -> bytes:
    shape = (pieces * PIECE,)
    tensor = LogicalTensor("buffer", shape, "float32")
    chunks = []
    for number in range(pieces):
        part = Slice((Region.whole("buffer", shape),), number * PIECE, (number + 1) * PIECE)
        chunks.append(Chunk((number * PIECE,), (PIECE,), TargetSlice("weight", part, {"buffer": tensor})))
    files = DistcpFiles(1 << 40)
    files.add_array(Array("buffer", shape, "float32", tuple(chunks)))
    return files.finish(with_shapes=False)[2]


@pytest.mark.parametrize("write", [by_torch, by_this_package], ids=lambda write: write.__name__)
def test_an_index_beyond_two_thousand_million_elements(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("the long way")

    (tmp_path / ".metadata").write_bytes(write())
    monkeypatch.setattr(safe_pickle.SafeUnpickler, "load", load)
    array = read_index(tmp_path).arrays["buffer"]
    assert array.shape == (PIECES * PIECE,)
    assert [chunk.offsets for chunk in array.chunks] == [(number * PIECE,) for number in range(PIECES)]


class Trap:
    """Whoever unpickles it is refused."""

    def __reduce__(self) -> Any:
        return os.getcwd, ()


def with_plans(plans: list[Any], **after: Any) -> bytes:
    metadata = pickle.loads(by_torch(FEW))
    vars(metadata).update(all_local_plans=plans, **after)
    return pickle.dumps(metadata)


def index_of(data: bytes, folder: Path) -> DcpIndex:
    (folder / ".metadata").write_bytes(data)
    return read_index(folder)


def test_the_plans_of_the_ranks_are_not_unpickled(tmp_path: Path) -> None:
    known = index_of(by_torch(FEW), tmp_path)
    assert not known.has_plans
    data = with_plans([Trap(), Trap()])
    assert index_of(data, tmp_path) == replace(known, has_plans=True)
    for length in (len(data) - 1, len(data) - 3, data.index(b"all_local_plans") + 40):
        with pytest.raises(CheckpointError):
            index_of(data[:length], tmp_path)


@pytest.mark.parametrize("plans", [[], [1], [1, 2]], ids=len)
def test_data_after_the_plans_is_read(plans: list[int], tmp_path: Path) -> None:
    shapes = {"buffer": {"nd_reformulated_orig_global_shape": (FEW, PIECE)}}
    found = index_of(with_plans(plans, mcore_data=shapes, last=[1, 2]), tmp_path)
    assert found.natural_shapes == {"buffer": (FEW, PIECE)}
    assert found.has_plans == bool(plans)


def test_an_array_may_be_named_like_the_plans(tmp_path: Path) -> None:
    metadata = pickle.loads(by_torch(FEW))
    metadata.state_dict_metadata["all_local_plans"] = metadata.state_dict_metadata.pop("buffer")
    metadata.storage_data = {replace(at, fqn="all_local_plans"): place for at, place in metadata.storage_data.items()}
    metadata.all_local_plans = [1, 2]
    found = index_of(pickle.dumps(metadata), tmp_path)
    assert len(found.arrays["all_local_plans"].chunks) == FEW
    assert found.has_plans


def test_a_shared_index_is_parsed_once_and_only_for_its_folder(tmp_path: Path) -> None:
    content = by_this_package(FEW)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / ".metadata").write_bytes(content)
    stored = FolderIndex(tmp_path / "one", SharedIndex(tmp_path / "one", content))
    assert stored.is_of(tmp_path / "other" / ".." / "one")
    assert not stored.is_of(tmp_path / "other")
    found = stored.content
    assert found is stored.content
    assert found.arrays.keys() == {"buffer"}
    assert stored.unshare().content is found
    assert FolderIndex(tmp_path / "other").content is not found
    with pytest.raises(UnreadableCheckpointError, match="cannot be read"):
        read_index(tmp_path / "one")


def test_a_damaged_shared_index_is_refused_by_its_file_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / ".metadata"))):
        _ = FolderIndex(tmp_path, SharedIndex(tmp_path, b"no index")).content


def test_an_index_shared_by_another_rank_is_parsed_and_lacks_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = with_plans([1, 2])
    lent_here = SharedIndex(tmp_path, data).without_plans()
    assert (len(lent_here.data) < len(data), lent_here.size) == (True, len(data))
    there = pickle.loads(pickle.dumps(lent_here))
    monkeypatch.setattr(dcp_index, "_parse", None)
    assert there.index == lent_here.index
    assert there.index.has_plans
    assert (there.folder, there.data, there.size) == (tmp_path, lent_here.data, len(data))
    assert pickle.loads(there.data).all_local_plans is True


def test_an_entry_with_a_shape_has_a_name(tmp_path: Path) -> None:
    """Whatever else were its name, the first rank alone would fail to hand the index to the others."""
    shapes = {dcp.MetadataIndex("buffer"): {"nd_reformulated_orig_global_shape": (FEW, PIECE)}}
    with pytest.raises(UnreadableCheckpointError, match="the name of an array is"):
        index_of(with_plans([], mcore_data=shapes), tmp_path)


def test_shapes_that_follow_the_plans_are_shared_with_them(tmp_path: Path) -> None:
    data = with_plans([1, 2], mcore_data={})
    assert SharedIndex(tmp_path, data).without_plans().data == data


def test_an_index_without_plans_is_shared_in_full(tmp_path: Path) -> None:
    data = by_torch(FEW)
    assert SharedIndex(tmp_path, data).without_plans().data == data


def test_chunks_are_a_sequence_like_any_other(tmp_path: Path) -> None:
    index = index_of(by_torch(FEW), tmp_path)
    chunks = index.arrays["buffer"].chunks
    whole = tuple(chunks)
    assert (len(chunks), chunks[3], chunks[-1], chunks[2:5]) == (FEW, whole[3], whole[-1], whole[2:5])
    assert whole[3] == StoredChunk(
        (3 * PIECE,), (PIECE,), ArchivedTensor("__0_0.distcp", 15 * PIECE, 5 * PIECE, "float32", (PIECE,))
    )
    assert (chunks == whole, whole == chunks, chunks == whole[1:], chunks == list(whole)) == (True, True, False, False)
    assert hash(chunks) == hash(whole)
    with pytest.raises(IndexError):
        chunks[FEW]
    there = pickle.loads(pickle.dumps(index))
    assert there == index


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4)], ids=str)
def test_chunks_of_any_number_of_axes(shape: tuple[int, ...]) -> None:
    table = ChunkTable()
    table.extend("float32", 2, ["other"], [7], [8], [(0, 0)], [(1, 1)])
    files = [f"file {number % 2}" for number in range(3)]
    offsets = [tuple(number * size for size in shape) for number in range(3)]
    chunks = table.extend("bfloat16", len(shape), files, [0, 10, 20], [100] * 3, offsets, [shape] * 3)
    table.extend("float32", 1, ["other"], [7], [8], [(0,)], [(1,)])
    expected = tuple(
        StoredChunk(offset, shape, ArchivedTensor(file, 10 * number, 100, "bfloat16", shape))
        for number, (file, offset) in enumerate(zip(files, offsets, strict=True))
    )
    assert tuple(chunks) == expected
    assert [chunks[number] for number in (0, 1, -1)] == [expected[0], expected[1], expected[2]]
    for part in (slice(1, None), slice(0, 0), slice(-2, 2), slice(None, None, 2)):
        assert tuple(chunks[part]) == expected[part]
    array = StoredArray("weight", (99,) * len(shape), "bfloat16", chunks)
    assert replace(array, chunks=expected) == array
    assert list(array.archives()) == list(replace(array, chunks=expected).archives())
    for axis in range(len(shape)):
        assert [*map(list, array.bounds_on(axis))] == [*map(list, replace(array, chunks=expected).bounds_on(axis))]


def of_record(**what: Any) -> Damage:
    def damage(metadata: dcp.Metadata) -> None:
        places = metadata.storage_data
        places[next(iter(places))] = replace(next(iter(places.values())), **what)

    return damage


def of_chunk(**what: Any) -> Damage:
    """Of a chunk, and of its record, which is looked up by its offsets."""

    def damage(metadata: dcp.Metadata) -> None:
        chunk = metadata.state_dict_metadata["buffer"].chunks[0]
        vars(chunk).update(what)
        place = metadata.storage_data.pop(next(iter(metadata.storage_data)))
        at = dcp.MetadataIndex("buffer")
        vars(at)["offset"] = chunk.offsets  # torch would take no such number
        metadata.storage_data[at] = place

    return damage


def of_object(metadata: dcp.Metadata) -> None:
    metadata.state_dict_metadata["object"] = dcp.BytesStorageMetadata()
    place = next(iter(metadata.storage_data.values()))
    metadata.storage_data[dcp.MetadataIndex("object")] = replace(place, offset=float("inf"))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (of_record(offset=1 << 63), "the chunks of buffer: .*int too (big|large)"),
        (of_record(length=1 << 63), "a length that is 9223372036854775808, which is no valid size, place or count"),
        (of_chunk(sizes=(float(PIECE),)), "the chunks of buffer: .*float"),
        (of_chunk(offsets=(0.0,)), r"a record of buffer at \(0.0,\)"),
        (of_chunk(offsets=(PIECES * PIECE,)), "a chunk of buffer lies outside of the array"),
        (of_chunk(offsets=(-1,)), "a chunk of buffer lies outside of the array"),
        (of_chunk(sizes=(-1,)), "a chunk of buffer lies outside of the array"),
        (of_chunk(sizes=(2, 3)), "a chunk of buffer has not as many axes as its array, 1"),
        (of_object, "an offset that is inf, which is no valid size, place or count"),
    ],
)
def test_an_invalid_position_is_damage(damage: Damage, expected: str, tmp_path: Path) -> None:
    metadata = pickle.loads(by_torch(FEW))
    damage(metadata)
    with pytest.raises(UnreadableCheckpointError, match="the checkpoint's index is damaged") as refusal:
        index_of(pickle.dumps(metadata), tmp_path)
    assert re.search(expected, str(refusal.value))


def test_chunks_that_are_refused_leave_nothing_behind() -> None:
    table = ChunkTable()
    with pytest.raises(TypeError):
        table.extend("float32", 1, ["file"], [0], [1], [(0,)], [(1.5,)])  # type: ignore[list-item]
    assert table.files == []
    assert not any((table.file_numbers, table.begins, table.lengths, table.offsets, table.sizes))


def with_object(folder: Path) -> tuple[bytes, Path]:
    """A checkpoint of one array and one object, as torch writes it."""
    state = {"buffer": torch.arange(6.0), "common": {"iteration": 7}}
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)
    return (folder / ".metadata").read_bytes(), folder


def objects_of(folder: Path) -> Any:
    state: dict[str, Any] = {"common.iteration": BytesIO()}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    torch.distributed.checkpoint.load(state, storage_reader=FileSystemReader(folder), planner=planner)
    return state["common.iteration"]


def unpickled(*_: Any) -> None:
    raise AssertionError("unpickled")


def test_torch_reads_objects_without_unpickling_a_shared_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, folder = with_object(tmp_path)
    handed = pickle.loads(pickle.dumps(SharedIndex(folder, data).without_plans()))
    assert handed.index.objects.keys() == {"common.iteration"}
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemReader, "read_metadata", unpickled)
        with read_index_once(FolderIndex(folder, handed)) as index:
            with index.objects_only():
                assert objects_of(folder) == 7
            with pytest.raises(CheckpointException):  # torch 2.9 does not give the reason
                objects_of(folder)


def test_megatron_reads_the_common_state_without_unpickling_a_shared_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dist_checkpointing = pytest.importorskip("megatron.core.dist_checkpointing")
    folder = fixture_named("p41").iteration
    data = (folder / ".metadata").read_bytes()
    before = dist_checkpointing.load_common_state_dict
    expected = before(str(folder))
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemReader, "read_metadata", unpickled)
        with share_index(FolderIndex(folder, SharedIndex(folder, data))):
            found = dist_checkpointing.load_common_state_dict(str(folder))
            also = sys.modules["megatron.core.dist_checkpointing.serialization"].load_common_state_dict(str(folder))
    assert found.keys() == also.keys() == expected.keys()
    assert vars(found["args"]) == vars(expected["args"])
    assert dist_checkpointing.load_common_state_dict is before


def test_torch_gets_all_else_as_it_is_stored(tmp_path: Path) -> None:
    data, folder = with_object(tmp_path)
    state = {"buffer": torch.zeros(6), "common": {"iteration": 0}}
    with read_index_once(FolderIndex(folder, SharedIndex(folder, data).without_plans())) as index:
        with index.objects_only():
            assert objects_of(folder) == 7
        torch.distributed.checkpoint.load(state, storage_reader=FileSystemReader(folder))
    assert state["buffer"].tolist() == [0, 1, 2, 3, 4, 5]  # type: ignore[attr-defined]


def test_a_damaged_shared_index_is_left_to_torch(tmp_path: Path) -> None:
    _, folder = with_object(tmp_path)
    (folder / ".metadata").write_bytes(b"no index")
    with (
        read_index_once(FolderIndex(folder, SharedIndex(folder, b"no index"))) as index,
        index.objects_only(),
        pytest.raises(CheckpointException, match="UnpicklingError|metadata"),
    ):
        objects_of(folder)


def test_a_reader_that_keeps_its_data_for_a_later_save_gets_all(tmp_path: Path) -> None:
    class Keeping(FileSystemReader):
        """As Megatron's `CachedMetadataFileSystemReader`."""

    data, folder = with_object(tmp_path)
    known = pickle.loads(data)
    stored = FolderIndex(folder, SharedIndex(folder, data).without_plans())
    with share_index(stored), read_index_once(stored) as index:
        with index.objects_only():
            assert FileSystemReader(folder).read_metadata().state_dict_metadata.keys() == {"common.iteration"}
            kept = Keeping(folder).read_metadata()
        also = FileSystemReader(folder).read_metadata()
    for found in (kept, also):
        assert found.state_dict_metadata == known.state_dict_metadata
        assert found.storage_data == known.storage_data
        assert pickle.loads(pickle.dumps(found)).planner_data == known.planner_data


def test_torch_sees_no_plans_in_an_index_shared_without_them(tmp_path: Path) -> None:
    data = with_plans([1, 2])
    (tmp_path / ".metadata").write_bytes(data)
    reader = FileSystemReader(tmp_path)
    assert reader.read_metadata().all_local_plans == [1, 2]  # type: ignore[attr-defined]
    with share_index(FolderIndex(tmp_path, SharedIndex(tmp_path, data).without_plans())):
        found = reader.read_metadata()
        assert not hasattr(found, "all_local_plans")
        assert found.state_dict_metadata == pickle.loads(data).state_dict_metadata
