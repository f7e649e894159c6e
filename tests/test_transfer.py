"""Reading runs of every shape: straight into memory, along, scattered, row by row, and through staging blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext import transfer as transfers
from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.planning.extents import RawArray
from mcore_ckpt_ext.planning.overlap import Runs
from mcore_ckpt_ext.planning.plan import Copy, Plan
from mcore_ckpt_ext.storage import pinned
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.transfer import Transfer

STORED = torch.arange(60_000, dtype=torch.float32)
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
    "far": (0, 4, 100, 20, 2000, 120),
    "long and near": (0, 4, 5000, 10, 5500, 5010),
}


@pytest.fixture
def reader(tmp_path: Path) -> FolderReader:
    (tmp_path / "raw").write_bytes(b"head" + STORED.numpy().tobytes())
    return FolderReader(tmp_path)


def plan_of(run: tuple[int, ...]) -> Plan:
    extent = RawArray("raw", 4, STORED.nbytes, "float32", len(STORED))
    return Plan([], [Copy(extent, 0, Runs(*(torch.tensor([number]).numpy() for number in run)))])


def expected(run: tuple[int, ...]) -> torch.Tensor:
    source, target, length, count, source_stride, target_stride = run
    memory = torch.full((70_000,), -1.0)
    for row in range(count):
        begin, place = source + row * source_stride, target + row * target_stride
        memory[place : place + length] = STORED[begin : begin + length]
    return memory


@pytest.mark.parametrize("name", RUNS)
def test_every_element_reaches_its_place_and_nothing_else_is_touched(name: str, reader: FolderReader) -> None:
    memory = torch.full((70_000,), -1.0)
    Transfer(reader).execute(plan_of(RUNS[name]), [memory])
    assert torch.equal(memory, expected(RUNS[name]))


@pytest.mark.parametrize("name", RUNS)
def test_a_view_of_other_memory_is_filled_as_well(name: str, reader: FolderReader) -> None:
    memory = torch.full((70_010,), -1.0)
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
    memory = torch.full((70_000,), -1.0)
    plan = plan_of(RUNS[name])
    transfer._read_staged(transfer.locate(plan.copies[0].extent), plan.copies[0].runs.rows(), memory)
    assert torch.equal(memory, expected(RUNS[name]))
    assert len(under_way) <= 2
    transfer._stages.wait()
    assert under_way == []


@pytest.mark.parametrize("name", RUNS)
def test_a_file_that_ends_too_early_is_told(name: str, reader: FolderReader) -> None:
    source, _, length, count, stride, _ = RUNS[name]
    with (reader.folder / "raw").open("r+b") as stream:
        stream.truncate(4 + 4 * (source + (count - 1) * stride + length) - 1)
    transfer, plan = Transfer(reader), plan_of(RUNS[name])
    # Whoever plans looks at the size; the file may shrink afterwards.
    extent = plan.copies[0].extent._replace(length=4)
    with pytest.raises(UnreadableCheckpointError, match="shorter than its metadata says"):
        transfer.execute(Plan([], [Copy(extent, 0, plan.copies[0].runs)]), [torch.empty(70_000)])
