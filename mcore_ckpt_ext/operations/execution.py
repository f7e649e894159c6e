"""Carrying out a conversion that has been laid out: into a folder on this machine, or in a remote store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from mcore_ckpt_ext.operations.destination import Destination
from mcore_ckpt_ext.operations.progress import ByteCounter, Progress
from mcore_ckpt_ext.operations.workers import Team
from mcore_ckpt_ext.planning.write_plan import Output, OutputFile, Record
from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.storage.publish import Publication
from mcore_ckpt_ext.storage.remote import Upload
from mcore_ckpt_ext.writing import FillBlock, RecordWriter, lay_out

Checks = tuple[Callable[[], None], Callable[[], None]]
"""That the source has not changed, and that what is written reads back."""


class Filling(Protocol):
    """Knows what belongs into the records."""

    @property
    def fill(self) -> FillBlock:
        """Fills a block of a record."""

    def note_written(self, record: Record) -> None:
        """Told of a record that is there already."""

    def finish(self, workers: int) -> None:
        """Told when every record of this process is there; raises CheckpointError where none of it may be published."""


class LocalOutput:
    """A folder beside the destination, filled record by record, and renamed when it is whole."""

    def __init__(self, destination: Destination, fingerprint: str, team: Team, workers: int, block_bytes: int) -> None:
        self._publication = Publication(destination.path, fingerprint, team.rank, destination.check_replaceable)
        self._team, self._workers, self._block_bytes = team, workers, block_bytes
        self.folder = self._publication.folder

    def write(
        self, output: Output, filler: Filling, checks: Checks, progress: Progress, *, force: bool, resume: bool
    ) -> None:
        """Write everything, let the checks look at it, and publish it.

        Raises:
            DestinationError: the destination exists, or the disk refuses.
            CheckpointError: what `filler` and `checks` raise.
        """
        team, publication = self._team, self._publication
        try:
            team.first(lambda: publication.open(force=force, resume=resume))
            team.all(publication.join)
            team.first(lambda: lay_out((file for file in output.files if not file.last), publication.content))
            team.all(lambda: self._fill(output, filler, progress))
            # The file that says that everything is there.
            team.first(lambda: lay_out((file for file in output.files if file.last), publication.content))
            for check in checks:
                team.first(check)
            team.first(publication.publish)
        finally:
            publication.close()

    def _fill(self, output: Output, filler: Filling, progress: Progress) -> None:
        """This process's share of the records; what an interrupted run finished is checked, not written again."""
        writer = RecordWriter(self._publication.content, filler.fill, self._workers, self._block_bytes)
        done = self._publication.done()
        mine = list(enumerate(output.records))[self._team.rank :: self._team.size]

        def is_there(numbered: tuple[int, Record]) -> bool:
            number, record = numbered
            return number in done and writer.confirm(record, done[number])

        with ThreadPoolExecutor(self._workers, thread_name_prefix="mcore_ckpt_ext") as pool:
            left = [numbered for numbered, there in zip(mine, pool.map(is_there, mine), strict=True) if not there]
        counter = _counter(mine, left, progress)
        writer.write(left, self._publication.note, counter.add)
        for record in {number: record for number, record in mine if number in done}.values():
            filler.note_written(record)
        filler.finish(self._workers)


class RemoteOutput:
    """Files made one at a time on this machine's disk, and uploaded; the one that says that all are there is last."""

    def __init__(self, destination: Destination, fingerprint: str, team: Team, workers: int, block_bytes: int) -> None:
        self._upload = Upload(destination.path, fingerprint, team.rank)
        self._team, self._workers, self._block_bytes = team, workers, block_bytes
        self.folder = destination.path

    def write(
        self, output: Output, filler: Filling, checks: Checks, progress: Progress, *, force: bool, resume: bool
    ) -> None:
        """Write everything; an existing remote folder is never replaced.

        What does not pass the second check loses the files by which it would pass for whole.
        """
        unchanged, readable = checks
        team = self._team
        records: dict[str, list[tuple[int, Record]]] = {}
        for number, record in enumerate(output.records):
            records.setdefault(record.file, []).append((number, record))
        ordinary = [file for file in output.files if not file.last]

        def share() -> None:
            done = self._upload.done()
            mine = ordinary[team.rank :: team.size]
            left = [file for file in mine if done.get(file.name) != file.length]
            counter = _counter(_records(mine, records), _records(left, records), progress)
            for file in left:
                self._make(file, records.get(file.name, []), filler, counter)
            for _, record in _records([file for file in mine if file not in left], records):
                filler.note_written(record)
            filler.finish(self._workers)

        team.first(lambda: self._upload.open(force=force, resume=resume))
        team.all(self._upload.join)
        team.all(share)
        team.first(unchanged)
        team.first(self._upload.check_claim)
        last = [file for file in output.files if file.last]
        try:
            for file in last:
                team.first(lambda file=file: self._make(file, [], filler, None))  # type: ignore[misc]  # bound at once
            team.first(readable)
        except BaseException:  # an interrupt, too
            if team.rank == 0:
                self._upload.withdraw([file.name for file in last])
            raise
        team.first(self._upload.publish)

    def _make(
        self, file: OutputFile, records: Sequence[tuple[int, Record]], filler: Filling, counter: ByteCounter | None
    ) -> None:
        with TemporaryDirectory(prefix="mcore_ckpt_ext_") as staging, Folder.at(Path(staging)) as folder:
            lay_out([file], folder)
            if counter is not None:
                writer = RecordWriter(folder, filler.fill, self._workers, self._block_bytes)
                writer.write(records, lambda number, crc: None, counter.add)
            self._upload.put(Path(staging) / file.name, file.name)


def _records(files: Sequence[OutputFile], records: dict[str, list[tuple[int, Record]]]) -> list[tuple[int, Record]]:
    return [numbered for file in files for numbered in records.get(file.name, [])]


def _counter(
    share: Sequence[tuple[int, Record]], left: Sequence[tuple[int, Record]], progress: Progress
) -> ByteCounter:
    """Counts how much of this process's share is written; a part of it may be there already."""
    total = sum(record.nbytes for _, record in share)
    return ByteCounter(total, progress, done=total - sum(record.nbytes for _, record in left))
