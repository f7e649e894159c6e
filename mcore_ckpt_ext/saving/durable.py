"""Making a saved checkpoint a fact on disk: all of it is there and flushed, and the tracker file comes last."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from mcore_ckpt_ext.formats.backend import CONFIG_FILE
from mcore_ckpt_ext.layout.sidecar import FILE_NAME
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE
from mcore_ckpt_ext.storage.publish import flush, flush_all, replace
from mcore_ckpt_ext.storage.runs import iteration_folders, iteration_number, read_tracker

_PROBE = ".mcore_ckpt_ext.probe"
_PROBE_BYTES = 1 << 12


class Disk:
    """The disk that holds a run, as far as saving changes it; a test puts another in its place."""

    def prepare(self, folder: Path, tracker: Path) -> None:
        """Make sure that a save into `folder` can begin, and that what lies there already no longer passes for whole.

        Megatron writes over a folder that exists, and leaves the old index and the old `metadata.json` standing beside
        the new files until it is done (`save`, megatron/core/dist_checkpointing/serialization.py, 0.7.0 to 0.19.2).

        Raises:
            OSError: the disk refuses.
        """
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / _PROBE
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
        if (folder / CONFIG_FILE).exists():
            _point_elsewhere(folder, tracker)
            for name in (CONFIG_FILE, METADATA_FILE, FILE_NAME):
                (folder / name).unlink(missing_ok=True)
            flush(folder)

    def settle(self, folder: Path) -> None:
        """Flush what Megatron wrote last, and the names of all files; its writers flush their own files.

        Raises:
            OSError: the disk refuses.
        """
        flush_all([folder / CONFIG_FILE, folder, folder.parent])

    def publish(self, folder: Path, sidecar: str, tracker: Path | None, text: str) -> None:
        """Once all else of a checkpoint is on the disk: put its sidecar there and point the tracker to it, for good.

        Args:
            folder: the iteration folder.
            sidecar: the text of its sidecar; empty where there is none.
            tracker: the tracker file, replaced in one step where Megatron truncates it first; None where Megatron has
                written it.
            text: what the tracker is to say.

        Raises:
            OSError: the disk refuses; the tracker names what it named.
        """
        files = {folder / FILE_NAME: sidecar} if sidecar else {}
        files |= {tracker: text} if tracker is not None else {}
        replace(files)
        with contextlib.suppress(OSError):  # the tracker already names it: this is no longer a failure
            flush_all([folder, folder.parent])

    def tracked(self, tracker: Path) -> int | None:
        """The iteration that a tracker names; None where it names none."""
        with contextlib.suppress(OSError):
            found = read_tracker(tracker)
            return found.iteration if found else None
        return None

    def discard(self, folders: Iterable[Path]) -> None:
        """Remove what is left of saves that failed; of one that resists, the file that makes it whole."""
        for folder in folders:
            self.remove(folder / CONFIG_FILE)
            shutil.rmtree(folder, ignore_errors=True)

    def copy(self, source: Path, target: Path) -> None:
        """Copy a small file, if that is possible."""
        with contextlib.suppress(OSError):
            shutil.copyfile(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file, if that is possible."""
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def finished_iterations(run: Path) -> list[int]:
    """Iterations with the file that Megatron writes last, newest first."""
    return [number for number, folder in iteration_folders(run).items() if (folder / CONFIG_FILE).is_file()]


def _point_elsewhere(folder: Path, tracker: Path) -> None:
    """Make a tracker that names the folder name the newest other finished iteration instead, or remove it."""
    own = iteration_number(folder)
    if own is None or Disk().tracked(tracker) != own:
        return
    others = [number for number in finished_iterations(folder.parent) if number != own]
    if others:
        replace({tracker: str(others[0])})
        with contextlib.suppress(OSError):
            flush(tracker.parent)
    else:
        tracker.unlink(missing_ok=True)
