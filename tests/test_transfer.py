"""Test reads of runs of every shape: directly into memory, strided, scattered, row by row, and staged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext import transfer as transfers
from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.planning.array_location import ArchivedTensor, RawArray
from mcore_ckpt_ext.planning.overlap import Runs
from mcore_ckpt_ext.planning.plan import Plan, PlannedRead
from mcore_ckpt_ext.storage import pinned, row_reader
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.overlay_reader import OverlayReader
from mcore_ckpt_ext.storage.paths import as_path, is_remote
from mcore_ckpt_ext.storage.remote import RemoteFolderReader
from mcore_ckpt_ext.storage.tensor_location import TensorLocation
from mcore_ckpt_ext.storage.tensor_locations import TensorLocations
from mcore_ckpt_ext.transfer import Transfer
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import flip
from tests.harness.jobs import copy_of

STORED = torch.arange(150_000, dtype=torch.float32)
# source, target, length, count, source stride, target stride
RUNS = {
    "one": (7, 3, 1000, 1, 0, 0),
    "short rows that follow each other": (11, 5, 20, 300, 20, 31),
    "rows that follow each other": (0, 9, 400, 30, 400, 500),
    "more rows than a call takes": (1, 2, 1, 3000, 1, 2),
    "rows that follow each other, many": (0, 0, 257, 200, 257, 260),
    "near": (3, 0, 100, 40, 900, 100),
    "near and spread": (3, 1, 100, 40, 900, 130),
    "more of them than are copied at once": (0, 0, 600, 50, 1100, 600),
    "as much between them as they have": (5, 2, 1500, 15, 3000, 1510),
    "short and near, many": (1, 2, 257, 550, 270, 258),
    "far": (0, 4, 100, 20, 2000, 120),
    "long and far": (3, 4, 300, 14, 9000, 310),
    "long and near": (0, 4, 5000, 10, 5500, 5010),
}


CONTENT = b"head" + STORED.numpy().tobytes()


@pytest.fixture
def reader(tmp_path: Path) -> FolderReader:
    (tmp_path / "raw").write_bytes(CONTENT)
    return FolderReader(tmp_path)


def plan_of(run: tuple[int, ...], file: str = "raw") -> Plan:
    extent = RawArray(file, 4, STORED.nbytes, "float32", len(STORED))
    return Plan([], [PlannedRead(extent, 0, Runs(*(torch.tensor([number]).numpy() for number in run)))])


def expected(run: tuple[int, ...]) -> torch.Tensor:
    source, target, length, count, source_stride, target_stride = run
    memory = torch.full((150_000,), -1.0)
    for row in range(count):
        begin, place = source + row * source_stride, target + row * target_stride
        memory[place : place + length] = STORED[begin : begin + length]
    return memory


@pytest.mark.parametrize("name", RUNS)
def test_every_element_reaches_its_place_and_nothing_else_is_touched(
    name: str, reader: FolderReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch.full((150_000,), -1.0)
    Transfer(reader).execute(plan_of(RUNS[name]), [memory])
    assert torch.equal(memory, expected(RUNS[name]))
    memory.fill_(-1.0)
    monkeypatch.setattr(row_reader, "_ROWS_AT_ONCE", 4)
    Transfer(reader).execute(plan_of(RUNS[name]), [memory])
    assert torch.equal(memory, expected(RUNS[name]))


@pytest.mark.parametrize("name", RUNS)
def test_remote_files_and_those_of_a_second_folder_are_read_in_the_same_ways(name: str, reader: FolderReader) -> None:
    remote, own = as_path("memory://rows"), reader.folder / "own"
    (remote / "raw").write_bytes(CONTENT)
    own.mkdir()
    assert is_remote(remote)
    both = OverlayReader(FolderReader(own), reader)
    for other, file in ((RemoteFolderReader(remote), "raw"), (both, both.name_of("raw"))):
        memory = torch.full((150_000,), -1.0)
        Transfer(other).execute(plan_of(RUNS[name], file), [memory])
        assert torch.equal(memory, expected(RUNS[name]))


@pytest.mark.parametrize(
    ("length", "gap", "is_read"),
    [
        (1023, 1023, True), (1023, 1024, False), (1024, 1, True), (1024, 1024, True), (1024, 1025, False),
        (2048, 2048, True), (2049, 2049, False), (5000, 2048, True), (300, 0, True),
    ],
)  # fmt: skip
def test_small_gaps_between_rows_are_read(length: int, gap: int, is_read: bool, reader: FolderReader) -> None:
    run = (0, 0, length, 10, length + gap, length)
    memory = torch.full((150_000,), -1.0)
    Transfer(reader).execute(plan_of(run), [memory])
    assert torch.equal(memory, expected(run))
    assert reader.bytes_read == 4 * (10 * length + 9 * gap * is_read)


@pytest.mark.parametrize("name", RUNS)
def test_each_element_is_shown_once(name: str, reader: FolderReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of a bounded size; all of it, where it comes to lie in one piece."""
    monkeypatch.setattr(row_reader, "_SHOWN_BYTES", 4000)
    memory, whole = torch.full((150_000,), -1.0), expected(RUNS[name])
    looked = torch.zeros(len(memory), dtype=torch.int64)

    def look(target: int, start: int, stop: int) -> None:
        assert target == 0 and 0 < stop - start <= 1000
        assert torch.equal(memory[start:stop], whole[start:stop])
        looked[start:stop] += 1

    Transfer(reader).execute(plan_of(RUNS[name]), [memory], look)
    assert torch.equal(memory, whole)
    _, _, length, count, _, stride = RUNS[name]
    everything = count == 1 or stride == length or length > 1000
    assert torch.equal(looked.bool(), (whole >= 0) if everything else looked.bool())
    assert int(looked.max()) <= 1 and not bool(looked[whole < 0].any())


@pytest.mark.parametrize("name", RUNS)
def test_a_view_of_other_memory_is_filled_as_well(name: str, reader: FolderReader) -> None:
    memory = torch.full((150_010,), -1.0)
    Transfer(reader).execute(plan_of(RUNS[name]), [memory[10:]])
    assert torch.equal(memory[10:], expected(RUNS[name]))
    assert torch.equal(memory[:10], torch.full((10,), -1.0))


@pytest.mark.parametrize("name", RUNS)
def test_on_the_way_to_a_device_blocks_are_used_in_turn(
    name: str, reader: FolderReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device: what is told to travel, travels at once; a block that is filled again has been waited for."""
    monkeypatch.setattr(pinned, "STAGE_BYTES", 4000)
    monkeypatch.setattr(transfers, "STAGE_BYTES", 4000)
    under_way: list[int] = []
    sent = iter(range(10_000))

    def send(_: torch.device) -> object:
        number = next(sent)
        under_way.append(number)
        return lambda: under_way.remove(number) if number in under_way else None

    def make(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    transfer = Transfer(reader)
    transfer._stages = pinned.Stages(make, send)  # type: ignore[arg-type]
    memory = torch.full((150_000,), -1.0)
    plan = plan_of(RUNS[name])
    transfer._read_staged(transfer.locate(plan.reads[0].extent), plan.reads[0].runs.rows(), memory)
    assert torch.equal(memory, expected(RUNS[name]))
    assert len(under_way) <= 2
    transfer._stages.wait()
    assert under_way == []


@pytest.mark.parametrize("name", RUNS)
def test_nothing_behind_the_last_element_is_asked_for(name: str, reader: FolderReader) -> None:
    source, _, length, count, stride, _ = RUNS[name]
    memory = torch.full((150_000,), -1.0)
    transfer, plan = Transfer(reader), plan_of(RUNS[name])
    transfer.locate(plan.reads[0].extent)
    os.truncate(reader.folder / "raw", 4 + 4 * (source + (count - 1) * stride + length))
    transfer.execute(plan, [memory])
    assert torch.equal(memory, expected(RUNS[name]))


@pytest.mark.parametrize("name", RUNS)
def test_a_truncated_file_is_reported(name: str, reader: FolderReader) -> None:
    source, _, length, count, stride, _ = RUNS[name]
    with (reader.folder / "raw").open("r+b") as stream:
        stream.truncate(4 + 4 * (source + (count - 1) * stride + length) - 1)
    transfer, plan = Transfer(reader), plan_of(RUNS[name])
    # Whoever plans looks at the size; the file may shrink afterwards.
    extent = plan.reads[0].extent._replace(length=4)
    with pytest.raises(UnreadableCheckpointError, match="shorter than its metadata says"):
        transfer.execute(Plan([], [PlannedRead(extent, 0, plan.reads[0].runs)]), [torch.empty(150_000)])


@pytest.mark.parametrize(
    ("cores", "own", "ranks", "threads"),
    [
        (2, 2, "8", 1), (96, 96, "8", 4), (16, 16, "8", 2), (3, 3, "", 3), (8, 8, "0", 4),
        (96, 3, "8", 3), (96, 16, "8", 2), (96, 2, "", 2), (96, 1, "64", 1),
    ],
)  # fmt: skip
def test_the_ranks_of_a_machine_share_its_cores(
    cores: int, own: int, ranks: str, threads: int, reader: FolderReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(own)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert Transfer(reader)._workers == threads
    assert Transfer(reader, workers=3)._workers == 3


def tensors_of(name: str) -> list[ArchivedTensor]:
    index = open_checkpoint(fixture_named(name).run).files.index()
    chunks = [chunk for array in index.arrays.values() for chunk in array.chunks]
    return [chunk.extent for chunk in chunks if isinstance(chunk.extent, ArchivedTensor)]


@pytest.mark.parametrize("name", ["p01", "p06", "p10", "p41"])
def test_an_archive_like_another_is_found_to_hold_what_it_does(name: str) -> None:
    reader = FolderReader(fixture_named(name).iteration)
    payloads = TensorLocations(reader)
    extents = tensors_of(name)
    assert {extent: payloads.locate(extent) for extent in extents} == {
        extent: TensorLocations(reader).locate(extent) for extent in extents
    }
    learned = sum(map(len, payloads._templates.values()))
    assert 0 < learned < len(extents) / 3


@pytest.mark.parametrize("place", [40, 70, 130, 300, -10, -30, -120, -150, -200, -260, -330])
def test_damage_to_an_archive_that_was_like_another_shows_as_if_it_were_alone(place: int, tmp_path: Path) -> None:
    run = copy_of(fixture_named("p10").run, tmp_path / "run")
    folder = run / fixture_named("p10").iteration.name
    by_length: dict[int, list[ArchivedTensor]] = {}
    for extent in tensors_of("p10"):
        by_length.setdefault(extent.length, []).append(extent)
    first, second, *_ = max(by_length.values(), key=len)
    payloads = TensorLocations(FolderReader(folder))
    payloads.locate(first)
    whole = payloads.locate(second)
    flip(folder / second.file, second.offset + (place if place > 0 else second.length + place))

    def outcome(knows_another: bool) -> TensorLocation | str:
        payloads = TensorLocations(FolderReader(folder))
        try:
            if knows_another:
                payloads.locate(first)
            return payloads.locate(second)
        except CheckpointError as error:
            return str(error)

    assert outcome(knows_another=True) == outcome(knows_another=False)
    if place == 70:  # within the description
        assert outcome(knows_another=True) != whole


@pytest.mark.parametrize("shape", [(3, 4), (12,), (4, 3, 1)], ids=str)
@pytest.mark.parametrize("seen_before", [False, True], ids=["first", "like one seen before"])
def test_a_record_of_another_shape_is_refused(shape: tuple[int, ...], seen_before: bool, tmp_path: Path) -> None:
    """As many elements in another order: they would be read as they lie."""
    torch.save(torch.zeros(shape), tmp_path / "file")
    length = (tmp_path / "file").stat().st_size
    payloads = TensorLocations(FolderReader(tmp_path))
    if seen_before:
        (tmp_path / "other").write_bytes((tmp_path / "file").read_bytes())
        assert payloads.locate(ArchivedTensor("other", 0, length, "float32", shape)).shape == shape
    with pytest.raises(UnreadableCheckpointError, match="does not match its metadata"):
        payloads.locate(ArchivedTensor("file", 0, length, "float32", (4, 3)))
