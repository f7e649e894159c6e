"""Test reads that bypass the page cache, next to those that use it."""

from __future__ import annotations

import errno
import fcntl
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from mcore_ckpt_ext.errors import StorageError, UnreadableCheckpointError
from mcore_ckpt_ext.planning.write_plan import Record
from mcore_ckpt_ext.storage import direct_reads
from mcore_ckpt_ext.storage.direct_reads import WORTH
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.writing import RecordWriter
from tests.harness.open_files import open_files

SIZE = (9 << 20) + 4_321

PReadV = Callable[[int, Sequence[Any], int], int]


@pytest.fixture(scope="module")
def data() -> bytes:
    return numpy.random.default_rng(7).bytes(SIZE)


@pytest.fixture
def folder(tmp_path: Path, data: bytes) -> Path:
    """A folder with one file that is not in the page cache."""
    path = tmp_path / "file"
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if direct_reads._is_cached(descriptor, 4 << 20):
            pytest.skip("this file system keeps its files in the page cache")
    except OSError:
        pytest.skip("this file system has no direct reads")
    finally:
        os.close(descriptor)
    return tmp_path


@pytest.fixture
def direct_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes how many bytes each direct read has asked for."""
    asked: list[int] = []
    replace_direct_reads(monkeypatch, asked.append)
    return asked


def replace_direct_reads(monkeypatch: pytest.MonkeyPatch, note: Callable[[int], object], most: int = 1 << 40) -> None:
    """Call `note` before each direct read, and let it return at most `most` bytes."""
    read: PReadV = os.preadv

    def preadv(descriptor: int, buffers: Sequence[Any], position: int) -> int:
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            return read(descriptor, buffers, position)
        note(sum(map(len, buffers)))
        return min(read(descriptor, buffers, position), most)

    monkeypatch.setattr(os, "preadv", preadv)


def read(folder: Path, offset: int, count: int) -> bytes:
    with FolderReader(folder).past_cache() as reader:
        read = reader.read("file", offset, count)
        assert reader.bytes_read == count
    return read


@pytest.mark.parametrize("offset", [0, 1, 511, 4_095, 4_096, 4_097, 1 << 20])
@pytest.mark.parametrize("count", [WORTH, WORTH + 1, (4 << 20) - 1, 4 << 20, (5 << 20) + 4_321, 8 << 20])
def test_every_byte_is_read(offset: int, count: int, folder: Path, data: bytes) -> None:
    assert read(folder, offset, count) == data[offset : offset + count]


def test_large_blocks_do_not_fill_the_page_cache(folder: Path, data: bytes, direct_bytes: list[int]) -> None:
    assert read(folder, 0, SIZE) == data
    assert sum(direct_bytes) >= 8 << 20
    with (folder / "file").open("rb") as file:
        assert not any(direct_reads._is_cached(file.fileno(), at) for at in range(0, 8 << 20, 1 << 20))


def test_a_block_is_one_read_wherever_it_begins(folder: Path, data: bytes, direct_bytes: list[int]) -> None:
    """A second read, for the last bytes, would wait for the blocks of other threads."""
    offset, count = 1_000_003, 4 << 20
    assert read(folder, offset, count) == data[offset : offset + count]
    assert direct_bytes == [count + direct_reads._PAGE]


def test_small_blocks_are_read_through_the_page_cache(folder: Path, data: bytes, direct_bytes: list[int]) -> None:
    assert read(folder, 5, WORTH - 1) == data[5 : WORTH + 4]
    assert not direct_bytes


def test_bytes_in_the_page_cache_are_read_from_it(folder: Path, data: bytes, direct_bytes: list[int]) -> None:
    assert (folder / "file").read_bytes() == data
    assert read(folder, 0, SIZE) == data
    assert not direct_bytes


def test_ranks_of_a_job_share_the_page_cache(folder: Path, data: bytes, direct_bytes: list[int]) -> None:
    with FolderReader(folder) as reader:
        assert reader.read("file", 0, SIZE) == data
    assert not direct_bytes


def test_short_reads_are_continued(folder: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_direct_reads(monkeypatch, lambda count: None, most=300_001)
    assert read(folder, 77, 6 << 20) == data[77 : (6 << 20) + 77]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_what_the_system_refuses_is_read_through_the_cache(
    code: int, folder: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(count: int) -> None:
        raise OSError(code, os.strerror(code))

    replace_direct_reads(monkeypatch, refuse)
    assert read(folder, 3, 5 << 20) == data[3 : (5 << 20) + 3]


def test_a_broken_disk_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, buffers: Sequence[Any], position: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError, match="cannot be read"):
        read(folder, 0, 5 << 20)


@pytest.mark.parametrize("offset", [SIZE - WORTH + 1, SIZE, SIZE + (8 << 20)])
def test_a_file_that_is_too_short_is_refused(offset: int, folder: Path) -> None:
    with pytest.raises(UnreadableCheckpointError, match="shorter than its metadata says"):
        read(folder, offset, WORTH)


def test_a_file_that_shrinks_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at its size and the read."""
    status = (folder / "file").stat()
    os.truncate(folder / "file", 1 << 20)
    monkeypatch.setattr(os, "fstat", lambda descriptor: status)
    with pytest.raises(UnreadableCheckpointError, match="shorter than its metadata says"):
        read(folder, 0, SIZE)


def test_a_file_that_was_replaced_is_read_as_it_was(folder: Path, data: bytes) -> None:
    with FolderReader(folder).past_cache() as reader:
        reader.size("file")
        (folder / "other").write_bytes(bytes(SIZE))
        (folder / "other").replace(folder / "file")
        assert reader.read("file", 0, SIZE) == data


def test_both_readers_of_a_folder_keep_few_files_open(tmp_path: Path) -> None:
    """By default a process may open 1024 files, and a comparison reads two folders."""
    names = [f"{number}" for number in range(200)]
    for name in names:
        with (tmp_path / name).open("wb") as file:
            file.truncate(WORTH)
    with FolderReader(tmp_path) as reader:
        past = reader.past_cache()
        for name in names:
            assert reader.size(name) == WORTH
            assert past.read(name, 0, WORTH) == bytes(WORTH)
        assert 128 <= open_files(tmp_path) <= 256
    assert open_files(tmp_path) == 0


def test_a_resumed_conversion_confirms_what_it_wrote_past_the_cache(
    folder: Path, data: bytes, direct_bytes: list[int]
) -> None:
    record = Record("file", 8, "int32", (SIZE - 8) // 4, ())
    crc = zlib.crc32(data[8 : 8 + record.nbytes])
    with Folder.at(folder) as opened:
        writer = RecordWriter(opened, lambda *_: None, 1, block_bytes=4 << 20)
        assert writer.confirm(record, crc)
        assert not writer.confirm(record, crc ^ 1)
        assert sum(direct_bytes) > 2 * 8 << 20
        descriptor = opened.open("file", os.O_RDONLY)
        assert not direct_reads._is_cached(descriptor, 2 << 20)
        os.close(descriptor)
