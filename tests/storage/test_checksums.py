"""Test checksums that are combined from those of pieces, and compared while pieces are read."""

from __future__ import annotations

import io
import runpy
import sys
import zlib
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mcore_ckpt_ext
from mcore_ckpt_ext import Legacy, TorchDist
from mcore_ckpt_ext.communicator import ONE_PROCESS
from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.operations import integrity, verification
from mcore_ckpt_ext.operations.options import VerificationOptions
from mcore_ckpt_ext.operations.workers import Workers
from mcore_ckpt_ext.planning.array_location import ArchivedTensor
from mcore_ckpt_ext.planning.overlap import Runs
from mcore_ckpt_ext.planning.plan import Plan, PlannedRead
from mcore_ckpt_ext.storage.checksums import Checksums, LenientChecksums
from mcore_ckpt_ext.storage.crc32 import combine_crc32, crc32, crc32_from_pieces
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.tensor_location import TensorLocation
from mcore_ckpt_ext.storage.tensor_locations import TensorLocations
from mcore_ckpt_ext.storage.torch_archive import ByteRange, TorchArchive
from mcore_ckpt_ext.transfer import Transfer
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import flip

NUMEL = 3000


@given(st.binary(max_size=9000), st.integers(0, 7), st.integers(0, 2**32 - 1))
def test_the_quicker_implementation_gives_the_same_numbers(data: bytes, begin: int, before: int) -> None:
    assert crc32.__module__ == "isal.isal_zlib"
    assert crc32(memoryview(data)[begin:], before) == zlib.crc32(data[begin:], before)
    assert crc32(data) == zlib.crc32(data)


def test_without_isal_there_is_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    without = runpy.run_path(str(Path(mcore_ckpt_ext.__file__).parent / "storage" / "crc32.py"))
    assert without["crc32"] is zlib.crc32
    assert without["crc32_from_pieces"](memoryview(b"abc"), [(1, 2, zlib.crc32(b"b"))]) == zlib.crc32(b"abc")


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_a_checksum_of_appended_data(first: bytes, second: bytes) -> None:
    assert combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_long_ones_follow_the_same_rule() -> None:
    data = bytes(range(251)) * 40_003
    assert combine_crc32(zlib.crc32(data[:77]), zlib.crc32(data[77:]), len(data) - 77) == zlib.crc32(data)


@given(st.binary(min_size=1, max_size=200), st.sets(st.integers(0, 200), max_size=6), st.booleans())
def test_pieces_that_are_known_are_not_looked_at(data: bytes, cuts: set[int], odd: bool) -> None:
    borders = sorted(min(cut, len(data)) for cut in cuts)
    known = [(a, b, zlib.crc32(data[a:b])) for a, b in zip(borders, borders[1:], strict=False)][odd::2]
    unseen = bytearray(data)
    for start, stop, _ in known:
        unseen[start:stop] = bytes(stop - start)
    assert crc32_from_pieces(memoryview(unseen), known, zlib.crc32(b"before")) == zlib.crc32(b"before" + data)


class Stored:
    """A tensor in an archive of its own, and what compares its checksums."""

    def __init__(self, folder: Path) -> None:
        tensor = torch.randn(NUMEL)
        archive = io.BytesIO()
        torch.save(tensor, archive)
        self.path = folder / "file"
        self.path.write_bytes(b"before" + archive.getvalue())
        self.data = tensor.numpy().tobytes()
        self.extent = ArchivedTensor("file", 6, len(archive.getvalue()), "float32", (NUMEL,))

    @property
    def place(self) -> ByteRange:
        return self.extent.file, self.extent.offset, self.extent.length

    def looked_at(self, kind: type[Checksums] = Checksums) -> tuple[Checksums, TensorLocation]:
        reader = FolderReader(self.path.parent)
        checksums = kind(reader)
        return checksums, TensorLocations(reader, checksums).locate(self.extent)

    def damage(self) -> None:
        flip(self.path, self.path.read_bytes().index(self.data) + 4000)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    monkeypatch.setattr(Checksums, "WORTH", 1024)
    return Stored(tmp_path)


def passing(checksums: Checksums, payload: TensorLocation, data: bytes, borders: list[int]) -> None:
    pieces = list(zip(borders, borders[1:], strict=False))
    for start, stop in pieces[::2] + pieces[1::2]:
        assert checksums.add_piece(payload, start, memoryview(data)[start:stop]) == zlib.crc32(data[start:stop])


def test_a_record_whose_pieces_have_passed_needs_no_other_look(stored: Stored) -> None:
    checksums, payload = stored.looked_at()
    assert len(checksums.rest()) == 1
    passing(checksums, payload, stored.data, [0, 17, 3000, 3001, len(stored.data)])
    assert checksums.rest() == []


def test_damage_shows_with_the_last_piece(stored: Stored) -> None:
    stored.damage()
    checksums, payload = stored.looked_at()
    damaged = stored.path.read_bytes()[payload.offset :][: len(stored.data)]
    assert damaged != stored.data
    with pytest.raises(UnreadableCheckpointError, match="is damaged: its checksum differs"):
        passing(checksums, payload, damaged, [0, 3000, len(damaged)])


def test_unverified_files_are_read(stored: Stored) -> None:
    checksums, payload = stored.looked_at()
    passing(checksums, payload, stored.data, [0, 3000])
    (left,) = checksums.rest()
    left()
    stored.damage()
    with pytest.raises(UnreadableCheckpointError, match="is damaged: its checksum differs"):
        left()


def test_only_unverified_files_are_read(stored: Stored) -> None:
    checksums, payload = stored.looked_at(LenientChecksums)
    passing(checksums, payload, stored.data, [0, 3000])
    checksums.add_piece(payload, 5000, memoryview(stored.data)[5000:-100])
    before = checksums._reader.bytes_read
    (left,) = checksums.rest()
    left()
    assert checksums._reader.bytes_read - before == 2000 + 100
    assert checksums.verified == {stored.place}


def test_rows_that_are_not_packed_in_memory_pass(stored: Stored) -> None:
    """As the columns of a matrix that tensor-parallel ranks share."""
    checksums, payload = stored.looked_at(LenientChecksums)
    rows = Runs(*(numpy.array([number]) for number in (0, 1, 10, NUMEL // 10, 10, 17)))
    plan, room = Plan([], [PlannedRead(stored.extent, 0, rows)]), torch.empty(NUMEL * 17 // 10)
    Transfer(checksums._reader).execute(plan, [room])
    assert checksums.add_plan(plan, [room], lambda extent: payload) == []
    assert (checksums.rest(), checksums.verified) == ([], {stored.place})


def test_pieces_that_overlap_prove_nothing(stored: Stored) -> None:
    """As many bytes as the record has, but not all of them: it is read."""
    stored.damage()
    checksums, payload = stored.looked_at()
    assert checksums.add_piece(payload, 0, memoryview(stored.data)[:3000])
    with pytest.raises(UnreadableCheckpointError, match="is damaged: its checksum differs"):
        checksums.add_piece(payload, 0 + 1000, memoryview(stored.data)[: len(stored.data) - 3000])


def test_small_files_are_compared_at_once(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.damage()
    monkeypatch.setattr(Checksums, "WORTH", 1 << 20)
    with pytest.raises(UnreadableCheckpointError, match="is damaged: its checksum differs"):
        stored.looked_at()


def test_an_archive_is_right_when_its_last_piece_has_passed(stored: Stored) -> None:
    checksums, payload = stored.looked_at(LenientChecksums)
    passing(checksums, payload, stored.data, [0, 3000])
    assert checksums.verified == set()
    passing(checksums, payload, stored.data, [3000, len(stored.data)])
    assert checksums.verified == {stored.place}


def test_a_small_archive_is_right_at_once(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checksums, "WORTH", 1 << 20)
    assert stored.looked_at(LenientChecksums)[0].verified == {stored.place}


@pytest.mark.parametrize("worth", [1024, 1 << 20])
def test_damage_is_not_right_and_refuses_nothing(worth: int, stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads for another purpose goes on; whoever asks for checksums looks again."""
    monkeypatch.setattr(Checksums, "WORTH", worth)
    stored.damage()
    reader = FolderReader(stored.path.parent)
    checksums = LenientChecksums(reader)
    payloads = TensorLocations(reader, checksums)
    plan = Plan(
        [], [PlannedRead(stored.extent, 0, Runs(*(numpy.array([number]) for number in (0, 0, NUMEL, 1, NUMEL, NUMEL))))]
    )
    found = torch.empty(NUMEL)
    Transfer(reader).execute(plan, [found])
    assert checksums.add_plan(plan, [found], payloads.locate) == []
    assert checksums.verified == set()


def test_a_damaged_record_next_to_the_elements_is_found(stored: Stored) -> None:
    """The elements pass, and are right; the archive is not, for another of its records is damaged."""
    archive = TorchArchive(FolderReader(stored.path.parent), *stored.place)
    (name,) = (name for name in archive.names if name.endswith("serialization_id"))
    flip(stored.path, archive.find_record(name)[0])
    checksums, payload = stored.looked_at(LenientChecksums)
    passing(checksums, payload, stored.data, [0, 3000, len(stored.data)])
    assert checksums.verified == set()


def _verification_of(checkpoint: mcore_ckpt_ext.Checkpoint) -> verification._Run:
    """A verification by one thread of a checkpoint that is open, whose reader counts."""
    stored = FolderIndex(checkpoint.files.folder)
    stored.checkpoint = checkpoint
    return verification._Run(stored, VerificationOptions(), Workers(ONE_PROCESS, 1), lambda done, total: None)


def test_verify_reads_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checksums, "WORTH", 1 << 9)
    folder = mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "out", TorchDist()).destination
    checkpoint = mcore_ckpt_ext.open_checkpoint(folder)
    run = _verification_of(checkpoint)
    compared: list[str] = []
    monkeypatch.setattr(
        integrity, "check_archives", lambda of, archives, *_: (compared.extend(file for file, *_ in archives) or [], [])
    )
    run.verify_or_note()
    assert [finding for finding in run.results.findings if finding.severity == "error"] == []
    assert len(compared) < 0.5 * len(list(checkpoint.files.archives()))


@pytest.mark.parametrize("name", ["p08", "p08b", "p08c", "p06"])
def test_verify_reads_large_files_of_many_tensors_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers and pickles, a third of so small a checkpoint, are read more often."""
    monkeypatch.setattr(Checksums, "WORTH", 1 << 9)
    checkpoint = mcore_ckpt_ext.open_checkpoint(fixture_named(name).run)
    run = _verification_of(checkpoint)
    run.verify_or_note()
    assert [finding for finding in run.results.findings if finding.severity == "error"] == []
    assert checkpoint.files.reader.bytes_read < 1.6 * sum(
        path.stat().st_size for path in checkpoint.files.folder.rglob("*.*")
    )


@pytest.mark.parametrize(
    ("name", "target"), [("p02", Legacy(tensor_model_parallel_size=4)), ("p43", TorchDist(megatron_version="0.19"))]
)
def test_a_conversion_writes_the_same_bytes_either_way(
    name: str, target: TorchDist | Legacy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fixture_named(name).run
    for worth in (1, 1 << 30):
        monkeypatch.setattr(Checksums, "WORTH", worth)
        mcore_ckpt_ext.convert(source, tmp_path / str(worth), target)
    paths = [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
    assert len(paths) > 3
    for path in paths:
        assert path.read_bytes() == (tmp_path / str(1 << 30) / path.relative_to(tmp_path / "1")).read_bytes(), path
