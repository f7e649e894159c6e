"""Opens what a conversion has written as its readers will, and links its files by their checksums."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mcore_ckpt_ext.errors import DestinationError, UnreadableCheckpointError, quantity
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.laid_out import OutputPlan
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.storage.file_digests import changed_checksums, digests_of_checksums, recorded_checksums
from mcore_ckpt_ext.storage.paths import is_remote


def read_back(folder: Path, source: CheckpointView, laid_out: OutputPlan) -> dict[str, str]:
    """Open the written folder as a reader would, and compare the names of its tensors with the source's.

    Returns:
        The digests that link its files. In a store, none of files of many archives: each would take two requests.

    Raises:
        DestinationError: the names differ.
        CheckpointError: the folder cannot be read.
    """
    written = (laid_out.reads_back or open_checkpoint)(folder)
    for kind in laid_out.kinds:
        expected = sorted(set(source.names(kind)) - set(laid_out.left_out))
        if sorted(written.names(kind)) != expected:
            raise DestinationError(
                "the written checkpoint differs from the source when read back; nothing was published",
                found=f"{quantity(len(written.names(kind)), 'tensor')} of {kind}",
                expected=f"{len(expected)}",
                where=str(folder),
            )
    files = written.files
    archives = [*files.archives()]
    if is_remote(folder) and len(archives) > len({file for file, *_ in archives}):
        archives = []
    return digests_of_checksums(files.reader, archives, files.raw_arrays())


def refuse_replaced_files(checkpoints: Iterable[CheckpointView]) -> None:
    """Refuse a converted folder that holds a whole file of another conversion or iteration.

    Raises:
        UnreadableCheckpointError: the checksums in a file are not those that were recorded.
    """
    for files in (checkpoint.files for checkpoint in checkpoints):
        recorded = recorded_checksums(files.folder)
        for file in changed_checksums(recorded, files.reader, files.archives(), files.raw_arrays()):
            raise UnreadableCheckpointError(
                "a file of the checkpoint belongs to another one",
                found=file.what,
                where=str(files.folder / file.name),
                hint="copy all files of one conversion again, or convert the source again",
            )
