"""Test records that several threads fill block by block, in any order."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext import writing
from mcore_ckpt_ext.errors import DestinationError
from mcore_ckpt_ext.planning.write_plan import Block, OutputFile, Record
from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.writing import RecordWriter, lay_out
from tests.harness.open_files import open_files

NUMEL, BLOCK = 1_003, 100
WAIT = 60


def record(numel: int) -> Record:
    return Record("file", 8, "int32", numel, (), checksums=(0,))


def written(folder: Path, whole: Record, writer: RecordWriter) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    writer.write([(7, whole)], lambda number, crc: told.append((number, crc)), lambda count: None)
    content = (folder / "file").read_bytes()
    assert told == [(7, zlib.crc32(content[8:]))]
    assert content[:4] == told[0][1].to_bytes(4, "little")
    return told


def numbers(record: Record, block: Block, elements: torch.Tensor) -> None:
    elements.copy_(torch.arange(block.start, block.stop))


@pytest.fixture
def small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_STRETCH_BYTES", 2 * 4 * BLOCK)


@pytest.mark.usefixtures("small_stretches")
@pytest.mark.parametrize("numel", [0, 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 1, NUMEL])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_record_in_stretches_is_the_record(numel: int, workers: int, tmp_path: Path) -> None:
    whole = record(numel)
    with Folder.at(tmp_path) as folder:
        lay_out([OutputFile("file", 8 + whole.nbytes, ())], folder)
        writer = RecordWriter(folder, numbers, workers, block_bytes=4 * BLOCK)
        ((_, crc),) = written(tmp_path, whole, writer)
        assert (tmp_path / "file").read_bytes()[8:] == torch.arange(numel, dtype=torch.int32).numpy().tobytes()
        assert writer.confirm(whole, crc)
        assert not writer.confirm(whole, crc ^ 1)


@pytest.mark.usefixtures("small_stretches")
def test_a_large_record_is_shared_by_the_threads(tmp_path: Path) -> None:
    """Each waits for the other within its first block: one thread alone would wait for ever."""
    both, begun = threading.Barrier(2), set[int]()

    def fill(record: Record, block: Block, elements: torch.Tensor) -> None:
        if threading.get_ident() not in begun:
            begun.add(threading.get_ident())
            both.wait(WAIT)
        numbers(record, block, elements)

    with Folder.at(tmp_path) as folder:
        lay_out([OutputFile("file", 8 + record(NUMEL).nbytes, ())], folder)
        written(tmp_path, record(NUMEL), RecordWriter(folder, fill, 2, block_bytes=4 * BLOCK))
    assert len(begun) == 2


def test_each_thread_works_alone_and_the_caller_keeps_its_own(tmp_path: Path) -> None:
    """Threads of torch's own, for each thread here, would wait for each other, spinning."""
    used = set[int]()

    def fill(record: Record, block: Block, elements: torch.Tensor) -> None:
        used.add(torch.get_num_threads())
        numbers(record, block, elements)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with Folder.at(tmp_path) as folder:
            lay_out([OutputFile("file", 8 + record(NUMEL).nbytes, ())], folder)
            written(tmp_path, record(NUMEL), RecordWriter(folder, fill, 2, block_bytes=4 * BLOCK))
        assert (used, torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("small_stretches")
def test_a_record_of_which_a_stretch_failed_is_not_finished(tmp_path: Path) -> None:
    def fill(record: Record, block: Block, elements: torch.Tensor) -> None:
        if block.start == 4 * BLOCK:
            raise OSError(28, "No space left on device")

    told: list[int] = []
    with Folder.at(tmp_path) as folder:
        lay_out([OutputFile("file", 8 + record(NUMEL).nbytes, ())], folder)
        writer = RecordWriter(folder, fill, 2, block_bytes=4 * BLOCK)
        with pytest.raises(DestinationError, match="No space left"):
            writer.write([(0, record(NUMEL))], lambda number, crc: told.append(number), lambda count: None)
    assert told == []


def test_a_file_is_closed_when_its_last_record_is_finished(tmp_path: Path) -> None:
    """A checkpoint of many ranks has more files than a process may open."""
    count, numel, workers = 40, 1 << 19, 2
    files = [OutputFile(str(number), 8 + 8 * numel, ()) for number in range(count)]
    records = [Record(file.name, 8 + half * 4 * numel, "int32", numel, ()) for file in files for half in (0, 1)]
    crcs: dict[int, int] = {}
    most = 0

    def fill(record: Record, block: Block, elements: torch.Tensor) -> None:
        nonlocal most
        most = max(most, open_files(tmp_path))
        numbers(record, block, elements)

    with Folder.at(tmp_path) as folder:
        lay_out(files, folder)
        writer = RecordWriter(folder, fill, workers)
        before = open_files(tmp_path)
        writer.write(list(enumerate(records)), crcs.__setitem__, lambda count: None)
        assert all(writer.confirm(record, crcs[number]) for number, record in enumerate(records))
        assert open_files(tmp_path) == before
    assert before < most <= before + 4 * workers
