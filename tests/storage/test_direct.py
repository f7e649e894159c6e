"""Test blocks that bypass the page cache, next to small writes that use it."""

from __future__ import annotations

import errno
import fcntl
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext.planning.write_plan import Block, OutputFile, Record
from mcore_ckpt_ext.storage import direct
from mcore_ckpt_ext.storage.direct import ALIGNMENT
from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.writing import RecordWriter, lay_out

BLOCK_BYTES = 4 << 20
NUMEL = (19 << 20) // 4 + 4_321
PAD = bytes(range(256))


def numbers(record: Record, block: Block, elements: torch.Tensor) -> None:
    elements.copy_(torch.arange(block.start, block.stop) * 7 + record.offset)


def written(folder: Path, *, offset: int = 320, workers: int = 3) -> None:
    """Two records with bytes around them, in one file, by several threads; checks every byte."""
    second = offset + 4 * NUMEL + 68
    records = [Record("file", at, "int32", NUMEL, (), checksums=(at - 4,)) for at in (offset, second)]
    length = second + 4 * NUMEL + len(PAD)
    with Folder.at(folder) as content:
        lay_out([OutputFile("file", length, ((0, PAD), (length - len(PAD), PAD)))], content)
        writer = RecordWriter(content, numbers, workers, BLOCK_BYTES)
        writer.write(list(enumerate(records)), lambda number, crc: None, lambda count: None)
    found = (folder / "file").read_bytes()
    assert len(found) == length
    assert (found[: len(PAD)], found[-len(PAD) :]) == (PAD, PAD)
    for one in records:
        data = (torch.arange(NUMEL) * 7 + one.offset).to(torch.int32).numpy().tobytes()
        assert found[one.offset : one.offset + len(data)] == data
        assert found[one.offset - 4 : one.offset] == zlib.crc32(data).to_bytes(4, "little")


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def direct_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, memoryview, int], int]], None]:
    """Replaces direct writes, and no other, by a function of the descriptor, the bytes and the position."""
    write = os.pwrite

    def replace(by: Callable[[int, memoryview, int], int]) -> None:
        def pwrite(descriptor: int, data: memoryview, position: int) -> int:
            return (by if is_direct(descriptor) else write)(descriptor, data, position)

        monkeypatch.setattr(os, "pwrite", pwrite)

    return replace


def offers_direct_writes(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.thorough
@pytest.mark.parametrize("offset", [260, 320, 262, 261, ALIGNMENT, ALIGNMENT + 64, ALIGNMENT - 64])
def test_every_byte_is_in_its_place(offset: int, tmp_path: Path) -> None:
    written(tmp_path, offset=offset)


def test_blocks_are_written_past_the_page_cache(
    tmp_path: Path, direct_writes: Callable[[Callable[[int, memoryview, int], int]], None]
) -> None:
    if not offers_direct_writes(tmp_path):
        pytest.skip("this file system has no direct writes")
    write, sizes = os.pwrite, []

    def count(descriptor: int, data: memoryview, position: int) -> int:
        sizes.append(len(data))
        return write(descriptor, data, position)

    direct_writes(count)
    written(tmp_path)
    assert sum(sizes) > 0.95 * 8 * NUMEL
    assert all(size % ALIGNMENT == 0 for size in sizes)


def test_ends_of_blocks_do_not_interrupt_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cached write would wait until no other thread writes directly, and block those that come after it."""
    if not offers_direct_writes(tmp_path):
        pytest.skip("this file system has no direct writes")
    write, are_direct = os.pwrite, []

    def note(descriptor: int, data: memoryview, position: int) -> int:
        are_direct.append(is_direct(descriptor))
        return write(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", note)
    written(tmp_path)
    first, last = are_direct.index(True), len(are_direct) - are_direct[::-1].index(True)
    assert all(are_direct[first:last])
    assert not any(are_direct[last:])


@pytest.mark.parametrize("held", [0, 3 * ALIGNMENT])
def test_no_more_is_held_than_allowed(held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_HELD_BYTES", held)
    written(tmp_path)


def test_a_file_system_that_refuses_is_written_through_the_cache(
    tmp_path: Path, direct_writes: Callable[[Callable[[int, memoryview, int], int]], None]
) -> None:
    def refuse(descriptor: int, data: memoryview, position: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    direct_writes(refuse)
    written(tmp_path)


def test_a_short_write_is_continued(
    tmp_path: Path, direct_writes: Callable[[Callable[[int, memoryview, int], int]], None]
) -> None:
    """The system refuses what is left of it, which is not aligned any more."""
    write = os.pwrite

    def shorten(descriptor: int, data: memoryview, position: int) -> int:
        if position % ALIGNMENT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return min(write(descriptor, data, position), 1_000)

    direct_writes(shorten)
    written(tmp_path)


def test_space_for_a_file_of_holes_is_not_taken(tmp_path: Path) -> None:
    """What is laid out and not filled stays a hole: space is reserved for what is written."""
    with Folder.at(tmp_path) as content:
        lay_out([OutputFile("file", 1 << 40, ((0, PAD),))], content)
    assert (tmp_path / "file").stat().st_blocks * 512 < 1 << 20


def test_space_is_reserved_for_a_whole_file(tmp_path: Path) -> None:
    """Several threads write into it, and a file system would otherwise allocate their blocks in turn."""
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 20)
        direct._reserve(file.fileno())
        assert os.fstat(file.fileno()).st_blocks * 512 >= 1 << 20


def test_only_large_writes_are_flushed_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the unaligned ends of direct writes, nor an empty range, which would mean the rest of the file."""
    counts: list[int] = []
    monkeypatch.setattr(direct, "begin_to_flush", lambda descriptor, position, count: counts.append(count))
    written(tmp_path)
    assert all(count >= 1 << 20 for count in counts)
