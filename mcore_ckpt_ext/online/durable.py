"""What makes a saved checkpoint a fact on disk: every file there in full and flushed, and the tracker file last."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from mcore_ckpt_ext.formats.checkpoint import TRACKER_FILE, iteration_folders, iteration_number
from mcore_ckpt_ext.formats.dcp_index import METADATA_FILE
from mcore_ckpt_ext.formats.torch_dist import CONFIG_FILE
from mcore_ckpt_ext.layout.sidecar import FILE_NAME
from mcore_ckpt_ext.storage.publish import flush, flush_all, replace

SCRATCH_TRACKER = f".{TRACKER_FILE}.scratch"
_PROBE = ".mcore_ckpt_ext.probe"
_PROBE_BYTES = 1 << 12


def stored_bytes(metadata: Metadata) -> int:
    """Bytes of all records of a checkpoint."""
    return sum(record.length for record in (metadata.storage_data or {}).values())


def problems_on_disk(metadata: Metadata, folder: Path) -> Iterator[str]:
    """What of a checkpoint is not there, by the index just written: records no rank wrote, files missing or cut off.

    Megatron itself counts the answers of each rank's writers, not what they wrote, and looks at no file.
    """
    records: dict[MetadataIndex, Any] = metadata.storage_data or {}
    # Which they are is asked only when the numbers differ: a large checkpoint has hundreds of thousands.
    entries = metadata.state_dict_metadata.values()
    planned = sum(len(entry.chunks) if isinstance(entry, TensorStorageMetadata) else 1 for entry in entries)
    lacking = [index for index in _expected(metadata) if index not in records] if planned != len(records) else []
    if lacking:
        yield f"{len(lacking)} of {len(lacking) + len(records)} records were written by no rank, first {lacking[0].fqn}"
    needed: dict[str, int] = {}
    for record in records.values():
        needed[record.relative_path] = max(needed.get(record.relative_path, 0), record.offset + record.length)
    for file, size in needed.items():
        found = _size(folder / file)
        if found < size:
            is_there = "it is not there" if found < 0 else f"{found:,} bytes"
            yield f"{file}: {is_there}, but its records need {size:,} bytes"


def _size(path: Path) -> int:
    """Bytes of a file, -1 where it cannot be looked at."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _expected(metadata: Metadata) -> Iterator[MetadataIndex]:
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            yield from (MetadataIndex(name, chunk.offsets) for chunk in stored.chunks)
        else:
            yield MetadataIndex(name)


def prepare(folder: Path, tracker: Path) -> None:
    """Make sure that a save into `folder` can begin, and that what lies there already no longer passes for whole.

    Megatron writes over a folder that exists, and leaves the old index and the old `metadata.json` standing beside the
    new files until it is done (`save`, megatron/core/dist_checkpointing/serialization.py, core_v0.7.0 to 0.19.2).

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


def _point_elsewhere(folder: Path, tracker: Path) -> None:
    """A tracker that names the folder names the newest other iteration that was finished, or goes."""
    own = iteration_number(folder)
    if own is None or tracked(tracker) != own:
        return
    others = [number for number in finished_iterations(folder.parent) if number != own]
    if others:
        publish_tracker(tracker, str(others[0]))
    else:
        tracker.unlink(missing_ok=True)


def tracked(tracker: Path) -> int | None:
    """The iteration that a tracker names; None where it names none."""
    with contextlib.suppress(OSError, ValueError):
        return int(tracker.read_text())
    return None


def finished_iterations(run: Path) -> list[int]:
    """Iterations with the file that Megatron writes last, newest first."""
    return [number for number, folder in iteration_folders(run).items() if (folder / CONFIG_FILE).is_file()]


def settle(folder: Path) -> None:
    """Have the disk keep what Megatron wrote last, and the names of all; its writers flush their own files.

    Raises:
        OSError: the disk refuses.
    """
    flush_all([folder / CONFIG_FILE, folder, folder.parent])


def publish(folder: Path, sidecar: str, tracker: Path | None, text: str) -> None:
    """Once all else of a checkpoint is on the disk: put its sidecar beside it and point the tracker to it, for good.

    Args:
        folder: the iteration folder.
        sidecar: the text of its sidecar; empty where there is none.
        tracker: the tracker file; None where Megatron has written it.
        text: what the tracker is to say.

    Raises:
        OSError: the disk refuses; the tracker names what it named.
    """
    files = {folder / FILE_NAME: sidecar} if sidecar else {}
    files |= {tracker: text} if tracker is not None else {}
    replace(files)
    with contextlib.suppress(OSError):  # the tracker names it by now: this is no failure any more
        flush_all([folder, folder.parent])


def publish_tracker(tracker: Path, text: str) -> None:
    """Replace the tracker in one step, where Megatron truncates it first: a kill or a full disk leaves the old one.

    Raises:
        OSError: the disk refuses; the tracker is as it was.
    """
    replace({tracker: text})
    with contextlib.suppress(OSError):  # it names the checkpoint by now: this is no failure any more
        flush(tracker.parent)


def discard(folders: Iterable[Path]) -> None:
    """Remove what is left of saves that failed; a folder that resists stays, without the file that makes it whole."""
    for folder in folders:
        with contextlib.suppress(OSError):
            (folder / CONFIG_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
