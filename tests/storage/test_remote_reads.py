"""Test which bytes a reader of a remote folder requests."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mcore_ckpt_ext.errors import StorageError
from mcore_ckpt_ext.storage.read_ahead import STORE_BLOCK_BYTES as BLOCK_BYTES
from mcore_ckpt_ext.storage.remote import RemoteFolderReader
from mcore_ckpt_ext.storage.store_path import StorePath

SIZE = 2 * BLOCK_BYTES + 4_321
WAIT = 60


@pytest.fixture(scope="module")
def folder() -> StorePath:
    place = StorePath.of(f"memory://{uuid.uuid4()}/run")
    (place / "file").write_bytes(bytes(range(251)) * (SIZE // 251) + bytes(SIZE % 251))
    return place


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that were requested."""
    ranges: list[tuple[int, int]] = []
    replace_requests(monkeypatch, lambda begin, end: ranges.append((begin, end)))
    return ranges


def replace_requests(monkeypatch: pytest.MonkeyPatch, note: Callable[[int, int], object]) -> None:
    read = StorePath.read_range

    def read_range(path: StorePath, begin: int, end: int) -> bytes:
        note(begin, end)
        return read(path, begin, end)

    monkeypatch.setattr(StorePath, "read_range", read_range)


@pytest.mark.parametrize(("offset", "count"), [(7, BLOCK_BYTES), (BLOCK_BYTES - 5, BLOCK_BYTES + 9), (1, SIZE - 1)])
def test_a_large_range_is_requested_alone(
    offset: int, count: int, folder: StorePath, requested: list[tuple[int, int]]
) -> None:
    data = RemoteFolderReader(folder).read("file", offset, count)
    assert data == (folder / "file").read_bytes()[offset : offset + count]
    assert requested == [(offset, offset + count)]


def test_small_ranges_share_requests_of_blocks(folder: StorePath, requested: list[tuple[int, int]]) -> None:
    reader = RemoteFolderReader(folder)
    content = (folder / "file").read_bytes()
    for offset in (3, 70_000, BLOCK_BYTES - 2, SIZE - 4):
        assert reader.read("file", offset, 4) == content[offset : offset + 4]
    assert requested == [(0, BLOCK_BYTES), (BLOCK_BYTES, 2 * BLOCK_BYTES), (2 * BLOCK_BYTES, SIZE)]


def test_threads_that_need_one_block_wait_for_one_request(folder: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request is answered when the other thread has asked for the block, too."""
    reader = RemoteFolderReader(folder)
    reader.size("file")
    requests: list[int] = []
    has_begun = threading.Event()

    def note(begin: int, end: int) -> None:
        requests.append(begin)
        has_begun.set()
        threading.Event().wait(0.2)

    replace_requests(monkeypatch, note)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(reader.read, "file", 3, 4)
        assert has_begun.wait(WAIT)
        second = pool.submit(reader.read, "file", 3, 4)
        assert first.result() == second.result() == bytes([3, 4, 5, 6])
    assert requests == [0]


def test_a_block_is_requested_again_after_an_error(folder: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = RemoteFolderReader(folder)
    with monkeypatch.context() as failing:
        failing.setattr(
            "fsspec.implementations.memory.MemoryFileSystem.cat_file",
            lambda *_, **__: (_ for _ in ()).throw(ConnectionError("broken")),
        )
        with pytest.raises(StorageError, match="broken"):
            reader.read("file", 3, 4)
    assert reader.read("file", 3, 4) == bytes([3, 4, 5, 6])
