"""Test which ranges of a store's files are requested before they are read, how many at once, and what errors become."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mcore_ckpt_ext.errors import StorageError, UnreadableCheckpointError
from mcore_ckpt_ext.storage.crc32 import crc32
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.paths import as_path
from mcore_ckpt_ext.storage.read_ahead import BYTES, PART_BYTES, REQUESTS, STORE_BLOCK_BYTES, FileRange
from mcore_ckpt_ext.storage.remote import RemoteFolderReader
from mcore_ckpt_ext.storage.store_path import StorePath

MEBI = 1 << 20
SIZE = 80 * MEBI
WAIT = 60


@pytest.fixture(scope="module")
def content() -> bytes:
    return bytes(range(251)) * (SIZE // 251 + 1)


@pytest.fixture(scope="module")
def folder(content: bytes) -> StorePath:
    place = StorePath.of(f"memory://{uuid.uuid4()}/run")
    (place / "file").write_bytes(content[:SIZE])
    return place


class Requests:
    """The requests to the store; `on_request` is called with the range of each before it is answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.on_request: Callable[[int, int], object] = lambda start, stop: None
        read = StorePath.read_range

        def read_range(path: StorePath, start: int, stop: int) -> bytes:
            self.ranges.append((start, stop))
            self.on_request(start, stop)
            return read(path, start, stop)

        monkeypatch.setattr(StorePath, "read_range", read_range)

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


@pytest.fixture
def reader(folder: StorePath) -> Iterator[RemoteFolderReader]:
    with RemoteFolderReader(folder) as opened:
        yield opened


def ranges_of(start: int) -> list[FileRange]:
    return [("file", start, 5 * MEBI)]


def test_ranges_of_the_next_items_are_requested_while_the_first_is_read(
    reader: RemoteFolderReader, requests: Requests, content: bytes
) -> None:
    """No request is answered before those of all three items have come; each byte is requested once."""
    starts = [7, 20 * MEBI + 1, 40 * MEBI]
    answered = threading.Barrier(6)
    requests.on_request = lambda start, stop: answered.wait(WAIT)
    read = [reader.read("file", start, 5 * MEBI) for start in reader.read_ahead(starts, ranges_of)]
    assert read == [content[start : start + 5 * MEBI] for start in starts]
    parts = [(start + begin, start + end) for start in starts for begin, end in ((0, 4 * MEBI), (4 * MEBI, 5 * MEBI))]
    assert sorted(requests.ranges) == parts


def test_one_large_range_is_requested_in_parts_at_once(
    reader: RemoteFolderReader, requests: Requests, content: bytes
) -> None:
    answered = threading.Barrier(3)
    requests.on_request = lambda start, stop: answered.wait(WAIT)
    assert reader.read("file", 3, 12 * MEBI) == content[3 : 3 + 12 * MEBI]
    assert sorted(requests.ranges) == [(3 + part * PART_BYTES, 3 + (part + 1) * PART_BYTES) for part in range(3)]


def test_a_checksum_reads_every_byte_once(reader: RemoteFolderReader, requests: Requests, content: bytes) -> None:
    assert reader.checksum("file", 5, 9 * MEBI) == crc32(content[5 : 5 + 9 * MEBI])
    assert requests.nbytes == 9 * MEBI
    assert len(requests.ranges) == 3


def test_small_ranges_ahead_share_blocks(reader: RemoteFolderReader, requests: Requests, content: bytes) -> None:
    starts = [0, 100, STORE_BLOCK_BYTES + 1, STORE_BLOCK_BYTES + 9]
    answered = threading.Barrier(2)
    requests.on_request = lambda start, stop: answered.wait(WAIT)
    read = [reader.read("file", start, 8) for start in reader.read_ahead(starts, lambda start: [("file", start, 8)])]
    assert read == [content[start : start + 8] for start in starts]
    assert sorted(requests.ranges) == [(0, STORE_BLOCK_BYTES), (STORE_BLOCK_BYTES, 2 * STORE_BLOCK_BYTES)]


def test_bytes_of_blocks_are_not_requested_again(
    reader: RemoteFolderReader, requests: Requests, content: bytes
) -> None:
    reader.read("file", 10, 4)
    assert reader.read("file", 100, MEBI) == content[100 : 100 + MEBI]
    assert requests.ranges == [(0, STORE_BLOCK_BYTES), (STORE_BLOCK_BYTES, 100 + MEBI)]


def test_sixteen_requests_are_under_way_and_no_more(reader: RemoteFolderReader, requests: Requests) -> None:
    together = threading.Barrier(REQUESTS)
    lock = threading.Lock()
    counts = {"now": 0, "most": 0}

    def count(start: int, stop: int) -> None:
        with lock:
            counts["now"] += 1
            counts["most"] = max(counts.values())
        together.wait(WAIT)
        with lock:
            counts["now"] -= 1

    requests.on_request = count
    step = STORE_BLOCK_BYTES
    starts = [number * step for number in range(4 * REQUESTS)]
    half = len(starts) // 2

    def read(part: list[int]) -> None:
        for start in reader.read_ahead(part, lambda start: [("file", start, step)]):
            reader.read("file", start, step)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, [starts[:half], starts[half:]]))
    assert counts["most"] == REQUESTS
    assert len(requests.ranges) == len(starts)


def test_memory_of_what_was_requested_ahead_is_bounded(reader: RemoteFolderReader, requests: Requests) -> None:
    """Five readers that have read nothing yet hold no more than the limit, and give it back when they end."""
    for _ in range(2):
        requests.ranges.clear()
        ahead = [reader.read_ahead(range(begin, SIZE, 5 * MEBI), ranges_of) for begin in range(5)]
        assert [next(items) for items in ahead] == list(range(5))
        deadline = time.monotonic() + WAIT
        while requests.nbytes <= BYTES - PART_BYTES and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert BYTES - PART_BYTES < requests.nbytes < BYTES + PART_BYTES
        for items in ahead:
            items.close()  # type: ignore[attr-defined]  # generators


def test_without_memory_each_range_is_requested_when_it_is_read(
    reader: RemoteFolderReader, requests: Requests, content: bytes
) -> None:
    others = [reader.read_ahead(range(begin, SIZE, 5 * MEBI), ranges_of) for begin in range(3)]
    for items in others:
        next(items)
    starts = [50 * MEBI + 3, 60 * MEBI + 3]
    assert [reader.read("file", start, MEBI) for start in starts] == [content[at : at + MEBI] for at in starts]
    del others


def test_an_error_of_a_request_ahead_names_the_file_when_it_is_read(
    reader: RemoteFolderReader, requests: Requests, content: bytes
) -> None:
    def refuse(start: int, stop: int) -> None:
        if start == 20 * MEBI:
            raise StorageError("the remote store cannot be read", found="broken", where=f"{reader.folder}/file")

    requests.on_request = refuse
    items = reader.read_ahead([0, 20 * MEBI, 40 * MEBI], ranges_of)
    assert reader.read("file", next(items), 5 * MEBI) == content[: 5 * MEBI]
    with pytest.raises(StorageError, match="broken.*/run/file"):
        reader.read("file", next(items), 5 * MEBI)
    requests.on_request = lambda start, stop: None
    assert reader.read("file", 20 * MEBI, 5 * MEBI) == content[20 * MEBI : 25 * MEBI]


def test_a_missing_file_is_reported_when_it_is_read(reader: RemoteFolderReader) -> None:
    items = reader.read_ahead(["file", "gone"], lambda file: [(file, 0, 8)])
    assert next(items) == "file"
    assert next(items) == "gone"
    with pytest.raises(UnreadableCheckpointError, match="gone"):
        reader.read("gone", 0, 8)


def test_threads_that_share_a_range_get_it_although_one_drops_it(
    reader: RemoteFolderReader, requests: Requests, content: bytes
) -> None:
    """The pool is busy, so that the request is cancelled before it begins while another thread waits for it."""
    release = threading.Event()
    requests.on_request = lambda start, stop: release.wait(WAIT)
    busy = reader.read_ahead(range(REQUESTS), lambda item: [("file", item * STORE_BLOCK_BYTES, STORE_BLOCK_BYTES)])
    next(busy)
    dropped = reader.read_ahead([60 * MEBI], ranges_of)
    next(dropped)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read, "file", 60 * MEBI, 5 * MEBI)
        threading.Event().wait(0.2)
        dropped.close()  # type: ignore[attr-defined]  # a generator
        release.set()
        assert reading.result(WAIT) == content[60 * MEBI : 65 * MEBI]


def test_a_local_folder_is_not_asked_for_ranges() -> None:
    def refuse(item: int) -> list[FileRange]:
        raise AssertionError(item)

    assert list(FolderReader(as_path("/")).read_ahead([1, 2], refuse)) == [1, 2]
