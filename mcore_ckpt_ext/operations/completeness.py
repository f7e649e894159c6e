"""Checks that all files of a finished save are present and large enough for every record.

The order in which Megatron writes shows how far a save came: `.distcp` files, `.metadata`, then `metadata.json`, then
the tracker file; an asynchronous save writes the latter two when it is finalized. Source: `save` in
megatron/core/dist_checkpointing/serialization.py and `save_checkpoint` in megatron/training/checkpointing.py,
core_v0.7.0 to 0.19.2.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, lt
from pathlib import Path
from typing import NamedTuple

from mcore_ckpt_ext.errors import ContentError, UnreadableCheckpointError, join_some, quantity
from mcore_ckpt_ext.formats.backend import CONFIG_FILE
from mcore_ckpt_ext.formats.format import Format
from mcore_ckpt_ext.formats.registry import FORMATS, format_of
from mcore_ckpt_ext.operations.findings import COMPLETE, Finding, error, warning
from mcore_ckpt_ext.storage.checked_files import is_stored
from mcore_ckpt_ext.storage.checkpoint_dirs import (
    TRACKER_FILE,
    Tracker,
    check_folder_exists,
    inner_folder,
    iteration_folders,
    iteration_number,
    no_checkpoint_error,
    read_tracker,
)
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE, RECORDS_SUFFIX, FolderIndex, check_plans
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.paths import entry_names, file_sizes, list_once

# Files that a folder of unrecognized format lacks: it is an unfinished save of `torch_dist`.
_OF_UNFINISHED = (CONFIG_FILE, METADATA_FILE)
_WITHOUT = {
    CONFIG_FILE: "missing: Megatron writes it last, so the save was interrupted, or is under way",
    METADATA_FILE: "missing: without this index the .distcp files cannot be read",
}
_OF_DATA = (RECORDS_SUFFIX, ".pt", ".safetensors", ".bin")
_SHARD = re.compile(r"(?P<key>.+)/shard_(?P<offsets>\d{1,9}(?:\.\d{1,9})*)_(?P<sizes>\d{1,9}(?:\.\d{1,9})*)")


@dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """The iteration folder to verify, or None, findings about its surroundings, and its index if used."""

    folder: Path | None
    findings: tuple[Finding, ...]
    index: FolderIndex | None = None


def find_checkpoint(path: Path, index: FolderIndex | None = None) -> LocatedCheckpoint:
    """Return the iteration folder that a path refers to.

    Args:
        path: a run folder, or an iteration folder.
        index: the index of the iteration folder, if it has been used before.

    Raises:
        UnreadableCheckpointError: there is no checkpoint, not even a part of one.
    """
    path = list_once(path)
    check_folder_exists(path)
    iterations = iteration_folders(path)
    if tracker := read_tracker(path / TRACKER_FILE):
        return _tracked_checkpoint(tracker, iterations)
    path = inner_folder(path)
    stored = index if index is not None and index.is_of(path) else FolderIndex(path)
    folder_format = format_of(path, stored)
    if _is_iteration(path, folder_format):
        return LocatedCheckpoint(path, tuple(_ahead_of_tracker(path)), stored)
    if folder_format is not None:
        return LocatedCheckpoint(path, (), stored)
    if not iterations:
        raise no_checkpoint_error(path)
    message = "missing, although there are iterations: no save has finished, since Megatron writes it last"
    return LocatedCheckpoint(iterations[max(iterations)], (error(COMPLETE, str(path / TRACKER_FILE), message),))


def _tracked_checkpoint(tracker: Tracker, iterations: Mapping[int, Path]) -> LocatedCheckpoint:
    where = str(tracker.path)
    named = tracker.iteration
    folder = tracker.folder
    if folder is None:
        return LocatedCheckpoint(None, (error(COMPLETE, where, f"it names no iteration: {tracker.text!r}"),))
    newer = [entry.name for number, entry in sorted(iterations.items()) if named is not None and number > named]
    findings = []
    if newer:
        message = f"it names {named}, but there is {join_some(newer)}: a save did not finish, or this file was edited; "
        message += f"verify {newer[-1]} to see whether it is complete"
        findings.append(warning(COMPLETE, where, message))
    if not folder.is_dir():
        others = join_some([entry.name for entry in iterations.values()]) or "no other iteration"
        findings.append(error(COMPLETE, where, f"it names {folder.name}, which does not exist; the run has {others}"))
        return LocatedCheckpoint(None, tuple(findings))
    return LocatedCheckpoint(folder, tuple(findings))


def _ahead_of_tracker(folder: Path) -> Iterator[Finding]:
    number = iteration_number(folder)
    tracker = read_tracker(folder.parent / TRACKER_FILE)
    if number is not None and tracker and tracker.iteration is not None and tracker.iteration < number:
        message = f"it names iteration {tracker.iteration}: this save was not finished, or not the last"
        yield warning(COMPLETE, str(tracker.path), message)


def _is_iteration(path: Path, folder_format: Format | None) -> bool:
    """Return True if a folder is an iteration of a job, finished or not, by its format or its files."""
    names = (CONFIG_FILE, METADATA_FILE, "common.pt")
    files = any((path / name).exists() for name in names) or next(path.glob("__*.distcp"), None) is not None
    return files or (folder_format is not None and folder_format.is_iteration)


def check_folder(stored: FolderIndex) -> list[Finding]:
    """Check the files without which nothing else can be checked, and name those of other formats."""
    folder = stored.folder
    folder_format = format_of(folder, stored)
    if folder_format is None and not _is_iteration(folder, folder_format):
        return [error(COMPLETE, str(folder), "the folder contains no file of a checkpoint")]
    required = _OF_UNFINISHED if folder_format is None else folder_format.required_files
    missing = [name for name in required if not is_stored(folder / name)]
    findings = [error(COMPLETE, str(folder / name), _WITHOUT[name], name) for name in missing]
    if folder_format is not None and folder_format.own_files:
        findings += _check_other_formats(folder, folder_format)
    return findings


def _check_other_formats(folder: Path, taken: Format) -> Iterator[Finding]:
    """Name the data files of other formats in a folder, as jobs leave them that change their format.

    Megatron takes one format of a folder, too, and says nothing of the others (`_get_checkpoint_format`,
    megatron/training/checkpointing.py, core_v0.12.1 to 0.19.2).
    """
    of_taken = re.compile("|".join(taken.own_files))
    of_any = re.compile("|".join(pattern for row in FORMATS for pattern in row.own_files))
    names = sorted(name for name in file_sizes(folder, skip_forbidden=True) if name.endswith(_OF_DATA))
    if foreign := [name for name in names if of_any.fullmatch(name) and not of_taken.fullmatch(name)]:
        message = f"read as {taken.name}; files of another format are not looked at: {join_some(foreign)}"
        yield warning(COMPLETE, str(folder), message)


def check_index_file(folder: Path) -> Iterator[Finding]:
    """Check the ranks' plans, the part of an index that nothing else reads."""
    if is_stored(folder / METADATA_FILE):
        try:
            check_plans(folder)
        except ContentError as problem:
            message = f"the ranks' plans at its end cannot be read, and stock Megatron fails to load it: {problem}"
            yield error(COMPLETE, str(folder / METADATA_FILE), message, METADATA_FILE)


class _Record(NamedTuple):
    offset: int
    length: int
    key: str


def check_index(
    reader: FolderReader, index: DcpIndex, is_read: Callable[[str], bool] = lambda key: True
) -> tuple[list[Finding], set[str], int]:
    """Check that every record of the index has its own place in its file.

    Args:
        reader: reads the folder of the index.
        index: the index.
        is_read: returns whether the record under a key is read; others may be missing, but share no bytes with these.

    Returns:
        The findings, the files with errors, and the number of files.
    """
    by_file: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for key, array in index.arrays.items():
        for file, offset, length in array.archives():
            by_file[file].append((offset, length, key))
    for key, stored in index.objects.items():
        by_file[stored.file].append((stored.offset, stored.length, key))
    findings = []
    unreadable = set()
    sizes = reader.sizes()
    for file, records in sorted(by_file.items()):
        records.sort()
        if _is_intact(reader, sizes.get(file), file, records):
            continue
        if damage := list(_damage(reader, file, records, is_read)):
            findings += damage
            unreadable.add(file)
    folder = reader.folder
    findings += _check_objects(str(folder), filter(is_read, index.objects))
    unknown = sorted(name for name in entry_names(folder) if name.endswith(RECORDS_SUFFIX) and name not in by_file)
    if unknown:
        findings.append(warning(COMPLETE, str(folder), f"files that are not in the index: {join_some(unknown)}"))
    return findings, unreadable, len(by_file)


def _check_objects(where: str, keys: Iterable[str]) -> Iterator[Finding]:
    """Check that every sharded object has all of its shards, as Megatron does when it saves.

    Source: `ShardedObject.unique_key` (mapping.py) and `_validate_objects_for_key` (validation.py, both in
    megatron/core/dist_checkpointing, core_v0.7.0 to 0.19.2). Random states of 0.7 lack the last size of their grid
    (`load_sharded_metadata`, strategies/common.py).
    """
    shards: defaultdict[tuple[str, str], list[tuple[int, ...]]] = defaultdict(list)
    for match in filter(None, map(_SHARD.fullmatch, keys)):
        shards[match["key"], match["sizes"]].append(tuple(map(int, match["offsets"].split("."))))
    for (key, grid), offsets in shards.items():
        sizes = [int(size) for size in grid.split(".")]
        if len(offsets[0]) == len(sizes) + 1:
            sizes.append(max(last for *_, last in offsets) + 1)
        if len(offsets) != prod(sizes):
            yield error(COMPLETE, where, f"{key} has {quantity(len(offsets), 'shard')} of {prod(sizes):,}")


def _is_intact(reader: FolderReader, size: int | None, file: str, records: Sequence[tuple[int, int, str]]) -> bool:
    """Return whether a file has all of its records, which are in their order in it: offset, length, key."""
    if size is None:
        try:
            size = reader.size(file)
        except UnreadableCheckpointError:
            return False
    offsets, lengths, _ = zip(*records, strict=True)
    ends = list(map(add, offsets, lengths))
    return min(offsets[0], *lengths) >= 0 and ends[-1] <= size and not any(map(lt, offsets[1:], ends))


def _damage(
    reader: FolderReader, file: str, records: Sequence[tuple[int, int, str]], is_read: Callable[[str], bool]
) -> Iterator[Finding]:
    """Yield what is wrong with the records of a file that are read."""
    path = reader.folder / file
    needed = [_Record(*record) for record in records if is_read(record[2])]
    if not needed:
        return
    try:
        size = reader.size(file)
    except UnreadableCheckpointError as problem:
        message = str(problem)
        if not path.is_file():
            keys = list(dict.fromkeys(record.key for record in needed))
            message = f"missing; it held {quantity(len(needed), 'record')}, of {join_some(keys)}"
        yield error(COMPLETE, str(path), message, path.name)
        return
    cut = [r for r in needed if r.offset < 0 or r.length < 0 or r.offset + r.length > size]
    if cut:
        keys = list(dict.fromkeys(record.key for record in cut))
        length_needed = max(record.offset + record.length for record in cut)
        yield error(
            COMPLETE,
            str(path),
            f"{quantity(size, 'byte')}, but its records need {length_needed:,}; cut off: {join_some(keys)}",
            path.name,
            size,
        )
    read_before = _Record(0, 0, "")
    before = read_before
    for record in map(_Record._make, records):
        reads = is_read(record.key)
        other = before if reads else read_before
        if record.offset < other.offset + other.length:
            message = f"the records of {other.key} and {record.key} overlap at byte {record.offset:,}"
            yield error(COMPLETE, str(path), message, path.name, record.offset)
        before = _later_end(before, record)
        read_before = _later_end(read_before, record) if reads else read_before


def _later_end(first: _Record, second: _Record) -> _Record:
    return second if second.offset + second.length >= first.offset + first.length else first
