"""Executes a planned conversion: into a folder on this machine, or in a remote store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

from mcore_ckpt_ext.communicator import Communicator, run_on_all, run_on_first
from mcore_ckpt_ext.operations.block_reader import BlockReader
from mcore_ckpt_ext.operations.destination import Destination
from mcore_ckpt_ext.operations.progress import ByteCounter, Progress
from mcore_ckpt_ext.operations.staged_uploads import staged_uploads
from mcore_ckpt_ext.planning.write_plan import Output, OutputFile, Record
from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.storage.publish import Publication
from mcore_ckpt_ext.storage.remote import Upload
from mcore_ckpt_ext.storage.store_path import StorePath
from mcore_ckpt_ext.writing import RecordWriter, lay_out

Checks = tuple[Callable[[], None], Callable[[], Sequence[OutputFile]]]
"""Checks that the source has not changed, and that the output can be read; files to write again after that."""


class LocalExecution:
    """A temporary folder in the destination's parent, filled record by record, renamed when complete."""

    def __init__(
        self, destination: Destination, fingerprint: str, team: Communicator, workers: int, block_bytes: int
    ) -> None:
        self._publication = Publication(destination.path, fingerprint, team.rank, destination.check_replaceable)
        self._team = team
        self._workers = workers
        self._block_bytes = block_bytes
        self.folder = self._publication.folder

    def write(
        self, output: Output, reader: BlockReader, checks: Checks, progress: Progress, *, force: bool, resume: bool
    ) -> list[str]:
        """Write everything, check it, and publish it.

        Returns:
            Notes about what could not be tidied up after that.

        Raises:
            DestinationError: the destination exists, or writing failed.
            CheckpointError: `reader` or `checks` raised it.
        """
        team = self._team
        publication = self._publication
        try:
            run_on_first(team, lambda: publication.open(force=force, resume=resume))
            run_on_all(team, publication.join)
            run_on_first(team, lambda: lay_out((file for file in output.files if not file.last), publication.content))
            run_on_all(team, lambda: self._fill(output, reader, progress))
            # These files mark the checkpoint as complete.
            run_on_first(team, lambda: lay_out((file for file in output.files if file.last), publication.content))
            unchanged, check_readable = checks
            run_on_first(team, unchanged)
            run_on_first(team, lambda: lay_out(check_readable(), publication.content))
            return run_on_first(team, publication.publish) or []
        finally:
            publication.close()

    def _fill(self, output: Output, reader: BlockReader, progress: Progress) -> None:
        """Write this process's share of the records.

        Records that an interrupted run finished are only checked.
        """
        writer = RecordWriter(
            self._publication.content, reader.fill, self._workers, self._block_bytes, reader.read_ahead
        )
        done = self._publication.finished_records()
        mine = list(enumerate(output.records))[self._team.rank :: self._team.size]

        def is_there(numbered: tuple[int, Record]) -> bool:
            number, record = numbered
            return number in done and writer.confirm(record, done[number])

        with ThreadPoolExecutor(self._workers, thread_name_prefix="mcore_ckpt_ext") as pool:
            left = [numbered for numbered, there in zip(mine, pool.map(is_there, mine), strict=True) if not there]
        counter = _counter(mine, left, progress)
        writer.write(left, self._publication.record_finished, counter.add)
        for record in {number: record for number, record in mine if number in done}.values():
            reader.note_written(record)
        reader.finish(self._workers)


class RemoteExecution:
    """Files made on the local disk and uploaded meanwhile; the ones that mark completion are last."""

    def __init__(
        self, destination: Destination, fingerprint: str, team: Communicator, workers: int, block_bytes: int
    ) -> None:
        self._upload = Upload(cast("StorePath", destination.path), fingerprint, team.rank)
        self._team = team
        self._workers = workers
        self._block_bytes = block_bytes
        self.folder = destination.path

    def write(
        self, output: Output, reader: BlockReader, checks: Checks, progress: Progress, *, force: bool, resume: bool
    ) -> list[str]:
        """Write everything; an existing remote folder is never replaced.

        If the second check fails, the files that mark the output as complete are removed again.

        Returns:
            Notes about what could not be tidied up after that.
        """
        unchanged, check_readable = checks
        team = self._team
        records: dict[str, list[tuple[int, Record]]] = {}
        for number, record in enumerate(output.records):
            records.setdefault(record.file, []).append((number, record))
        ordinary = [file for file in output.files if not file.last]

        def share() -> None:
            done = self._upload.finished_files()
            mine = ordinary[team.rank :: team.size]
            left = [file for file in mine if done.get(file.name) != file.length]
            counter = _counter(_records(mine, records), _records(left, records), progress)
            with staged_uploads(self._upload) as uploads:
                for file in left:
                    uploads.add(file, partial(self._make, file, records.get(file.name, []), reader, counter))
            for _, record in _records([file for file in mine if file not in left], records):
                reader.note_written(record)
            reader.finish(self._workers)

        run_on_first(team, lambda: self._upload.open(resume=resume))
        run_on_all(team, self._upload.join)
        run_on_all(team, share)
        run_on_first(team, unchanged)
        run_on_first(team, self._upload.check_claim)
        last = [file for file in output.files if file.last]
        try:
            for file in last:
                run_on_first(team, lambda file=file: self._put([file]))  # type: ignore[misc]  # bound at once
            run_on_first(team, lambda: self._put(check_readable()))
        except BaseException:  # interrupts included
            if team.rank == 0:
                self._upload.withdraw([file.name for file in last])
            raise
        return run_on_first(team, self._upload.publish) or []

    def _make(
        self,
        file: OutputFile,
        records: Sequence[tuple[int, Record]],
        reader: BlockReader,
        counter: ByteCounter,
        folder: Folder,
    ) -> None:
        lay_out([file], folder)
        writer = RecordWriter(folder, reader.fill, self._workers, self._block_bytes, reader.read_ahead)
        writer.write(records, lambda number, crc: None, counter.add)

    def _put(self, files: Sequence[OutputFile]) -> None:
        """Upload files without records."""
        with staged_uploads(self._upload) as uploads:
            for file in files:
                uploads.add(file, partial(lay_out, [file]))


def _records(files: Sequence[OutputFile], records: dict[str, list[tuple[int, Record]]]) -> list[tuple[int, Record]]:
    return [numbered for file in files for numbered in records.get(file.name, [])]


def _counter(
    share: Sequence[tuple[int, Record]], left: Sequence[tuple[int, Record]], progress: Progress
) -> ByteCounter:
    """Return a counter for this process's share, of which a part may be written already."""
    total = sum(record.nbytes for _, record in share)
    return ByteCounter(total, progress, done=total - sum(record.nbytes for _, record in left))
