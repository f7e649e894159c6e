"""Commits a checkpoint on disk: all files are present and flushed before the tracker names it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from mcore_ckpt_ext.formats.backend import CONFIG_FILE
from mcore_ckpt_ext.layout.sidecar import FILE_NAME, add_index_digest
from mcore_ckpt_ext.storage.atomic_files import flush, flush_all, replace_files
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_folders, iteration_number, read_tracker
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE, RECORDS_SUFFIX, read_index_digest

_PROBE = ".mcore_ckpt_ext.probe"
_PROBE_BYTES = 1 << 12


class Disk:
    """The operations of a save on the disk that holds a run; tests replace it."""

    def prepare(self, folder: Path, tracker: Path) -> None:
        """Make sure that a save into `folder` can begin; a checkpoint there no longer counts as complete.

        Megatron writes over a folder that exists, and leaves the old index and the old `metadata.json` next to the new
        files until it is done (`save`, megatron/core/dist_checkpointing/serialization.py, 0.7.0 to 0.19.2).

        Raises:
            OSError: writing failed; the former checkpoint is still complete, but the tracker may no longer name it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._probe(folder / _PROBE)
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()  # removes it only if it is empty
            raise
        if self.is_tracked(folder, tracker):
            _point_elsewhere(folder, tracker)
        # The first file makes a checkpoint complete; the sidecar describes buffers that will be overwritten.
        for name in (CONFIG_FILE, METADATA_FILE, FILE_NAME):
            (folder / name).unlink(missing_ok=True)
        flush(folder)

    def _probe(self, probe: Path) -> None:
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)

    def settle(self, folder: Path) -> None:
        """Flush the files that Megatron's writers do not flush, and all directory entries.

        They flush the `.distcp` files (`FileSystemWriterAsync`, strategies/filesystem_async.py, core_v0.7.0 to 0.19.2),
        but not `common.pt` (`save_common`, strategies/common.py) and `metadata.json` (`save_config`, core.py).

        Raises:
            OSError: flushing failed, or the file that Megatron writes last is absent.
        """
        plain = {path for path in folder.iterdir() if path.suffix != RECORDS_SUFFIX and path.is_file()}
        flush_all([*plain | {folder / CONFIG_FILE}, folder, folder.parent])

    def publish(self, folder: Path, sidecar: str, tracker: Path | None, text: str) -> None:
        """Write the sidecar of a checkpoint and let the tracker name it, after everything else is on disk.

        Args:
            folder: the iteration folder.
            sidecar: the text of its sidecar, which gets the digest of the folder's index; empty if there is none.
            tracker: the tracker file, which is replaced atomically (Megatron truncates it first); None if Megatron has
                written it.
            text: the tracker's new content.

        Raises:
            OSError: writing failed; the tracker is unchanged.
        """
        digest = read_index_digest(folder) if sidecar else None
        files = {folder / FILE_NAME: add_index_digest(sidecar, digest) if digest else sidecar} if sidecar else {}
        files |= {tracker: text} if tracker is not None else {}
        replace_files(files)
        with contextlib.suppress(OSError):  # the tracker already names the checkpoint: this is no longer a failure
            flush_all([folder, folder.parent])

    def is_whole(self, folder: Path) -> bool:
        """Return True if a folder holds a checkpoint that Megatron has finished."""
        return (folder / CONFIG_FILE).is_file()

    def is_tracked(self, folder: Path, tracker: Path) -> bool:
        """Return True if a tracker names this folder, which lies in the same run."""
        with contextlib.suppress(OSError):
            tracked = read_tracker(tracker)
            return tracked is not None and tracked.folder is not None and tracked.folder.name == folder.name
        return False

    def discard(self, folders: Iterable[Path]) -> None:
        """Remove what is left of failed saves; if that fails, at least the file that marks them as complete."""
        for folder in folders:
            self.remove(folder / CONFIG_FILE)
            shutil.rmtree(folder, ignore_errors=True)

    def copy(self, source: Path, target: Path) -> None:
        """Copy a small file; ignore errors."""
        with contextlib.suppress(OSError):
            shutil.copyfile(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file; ignore errors."""
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def finished_iterations(run: Path) -> list[int]:
    """Return the iterations with the file that Megatron writes last, newest first."""
    return [number for number, folder in iteration_folders(run).items() if (folder / CONFIG_FILE).is_file()]


def _point_elsewhere(folder: Path, tracker: Path) -> None:
    """Make a tracker name the newest finished iteration before a folder's, or remove it.

    Later iterations were saved before a rollback.
    """
    iteration = iteration_number(folder)
    earlier = [number for number in finished_iterations(folder.parent) if iteration is None or number < iteration]
    if earlier:
        replace_files({tracker: str(earlier[0])})
    else:
        tracker.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        flush(tracker.parent)
