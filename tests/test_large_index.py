"""Indexes of large checkpoints are read by the short way, whoever wrote them; the long one would refuse their size."""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError
from mcore_ckpt_ext.formats.distcp_files import Array, Chunk, DistcpFiles
from mcore_ckpt_ext.hooks.shared_index import index_shared
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.plan import WantedSlice
from mcore_ckpt_ext.storage import dcp_index, safe_pickle
from mcore_ckpt_ext.storage.dcp_index import DcpIndex, Lent, lent, read_index

# A gradient buffer of one bucket, beyond 2**31 elements, in so many pieces.
PIECES, PIECE = 4000, 1 << 20
FEW = 20


def by_torch(pieces: int = PIECES) -> bytes:
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    chunks = []
    for number in range(pieces):
        offsets, sizes = torch.Size((number * PIECE,)), torch.Size((PIECE,))
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        place = torch.distributed.checkpoint.filesystem._StorageInfo("__0_0.distcp", number * 5 * PIECE, 5 * PIECE)
        places[MetadataIndex("buffer", offsets, number)] = place
    properties = TensorProperties(torch.float32)
    entries["buffer"] = TensorStorageMetadata(properties, torch.Size((pieces * PIECE,)), chunks)
    return pickle.dumps(Metadata(entries, None, places))


def by_this_package(pieces: int = PIECES) -> bytes:
    shape = (pieces * PIECE,)
    tensor = LogicalTensor("buffer", shape, "float32")
    chunks = []
    for number in range(pieces):
        part = Slice((Region.whole("buffer", shape),), number * PIECE, (number + 1) * PIECE)
        chunks.append(Chunk((number * PIECE,), (PIECE,), WantedSlice("weight", part, {"buffer": tensor})))
    files = DistcpFiles(1 << 40)
    files.add_array(Array("buffer", shape, "float32", tuple(chunks)))
    return files.finish(with_shapes=False)[2]


@pytest.mark.parametrize("write", [by_torch, by_this_package], ids=lambda write: write.__name__)
def test_an_index_beyond_two_thousand_million_elements(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weigh(*_: Any) -> None:
        raise AssertionError("the long way")

    monkeypatch.setattr(safe_pickle, "weigh", weigh)
    (tmp_path / ".metadata").write_bytes(write())
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
def test_what_comes_after_the_plans_is_read(plans: list[int], tmp_path: Path) -> None:
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


def test_what_is_lent_is_parsed_once_and_only_for_its_folder(tmp_path: Path) -> None:
    content = by_this_package(FEW)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / ".metadata").write_bytes(content)
    with lent(Lent(tmp_path / "one", content)):
        found = read_index(tmp_path / "other" / ".." / "one")
        assert found is read_index(tmp_path / "one")
        assert found.arrays.keys() == {"buffer"}
        assert read_index(tmp_path / "other") is not found
    with pytest.raises(UnreadableCheckpointError, match="cannot be read"):
        read_index(tmp_path / "one")


def test_what_is_lent_damaged_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    with (
        lent(Lent(tmp_path, b"no index")),
        pytest.raises(CheckpointError, match=re.escape(str(tmp_path / ".metadata"))),
    ):
        read_index(tmp_path)


def test_what_another_rank_is_lent_is_parsed_already_and_lacks_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = with_plans([1, 2])
    lent_here = Lent(tmp_path, data).without_plans()
    assert (len(lent_here.data) < len(data), lent_here.size) == (True, len(data))
    there = pickle.loads(pickle.dumps(lent_here))
    monkeypatch.setattr(dcp_index, "_parsed", None)
    assert there.index == lent_here.index
    assert there.index.has_plans
    assert (there.folder, there.data, there.size) == (tmp_path, lent_here.data, len(data))
    assert pickle.loads(there.data).all_local_plans is True


def test_what_has_a_shape_has_a_name(tmp_path: Path) -> None:
    """Whatever else were its name, the first rank alone would fail to hand the index to the others."""
    shapes = {MetadataIndex("buffer"): {"nd_reformulated_orig_global_shape": (FEW, PIECE)}}
    with pytest.raises(UnreadableCheckpointError, match="the name of an array is"):
        index_of(with_plans([], mcore_data=shapes), tmp_path)


def test_shapes_that_follow_the_plans_are_lent_with_them(tmp_path: Path) -> None:
    data = with_plans([1, 2], mcore_data={})
    assert Lent(tmp_path, data).without_plans().data == data


def test_an_index_without_plans_is_lent_whole(tmp_path: Path) -> None:
    data = by_torch(FEW)
    assert Lent(tmp_path, data).without_plans().data == data


def test_torch_sees_no_plans_in_an_index_that_is_lent_without_them(tmp_path: Path) -> None:
    data = with_plans([1, 2])
    (tmp_path / ".metadata").write_bytes(data)
    reader = FileSystemReader(tmp_path)
    assert reader.read_metadata().all_local_plans == [1, 2]
    with index_shared(Lent(tmp_path, data).without_plans()):
        found = reader.read_metadata()
        assert not hasattr(found, "all_local_plans")
        assert found.state_dict_metadata == pickle.loads(data).state_dict_metadata
