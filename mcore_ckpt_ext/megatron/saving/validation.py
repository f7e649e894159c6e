"""Validates files against the index of a checkpoint: all records written, all files complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from mcore_ckpt_ext.collectives import attempt, text_of
from mcore_ckpt_ext.errors import quantity


def stored_bytes(metadata: Metadata) -> int:
    """Return the size of all records of a checkpoint in bytes."""
    return sum(record.length for record in (metadata.storage_data or {}).values())


def problems_on_disk(metadata: Metadata, folder: Path) -> Iterator[str]:
    """Yield the problems on disk: records that no rank wrote, and missing or truncated files.

    Megatron itself counts the results of each rank's writers, not their content, and checks no file.
    """
    records: dict[MetadataIndex, Any] = metadata.storage_data or {}
    # Compare the keys only if the numbers differ: a large checkpoint has hundreds of thousands.
    entries = metadata.state_dict_metadata.values()
    planned = sum(len(entry.chunks) if isinstance(entry, TensorStorageMetadata) else 1 for entry in entries)
    lacking = [index for index in _expectations(metadata) if index not in records] if planned != len(records) else []
    if lacking:
        total = len(lacking) + len(records)
        yield f"{len(lacking):,} of {quantity(total, 'record')} were not written by any rank, first {lacking[0].fqn}"
    needed: dict[str, int] = {}
    for record in records.values():
        needed[record.relative_path] = max(needed.get(record.relative_path, 0), record.offset + record.length)
    for file, size in needed.items():
        actual_size = _size(folder / file)
        if actual_size < size:
            is_there = "it does not exist" if actual_size < 0 else quantity(actual_size, "byte")
            yield f"{file}: {is_there}, but its records need {quantity(size, 'byte')}"


def _with_records(metadata: Metadata, results: Iterable[Iterable[WriteResult]]) -> Metadata:
    """Return the index with the places of its records, which the writers of all ranks report.

    torch 2.9 to 2.11 add them only to a copy, which they write (`_FileSystemWriter.finish`, torch/distributed/
    checkpoint/filesystem.py).
    """
    return replace(metadata, storage_data={write.index: write.storage_data for of_rank in results for write in of_rank})


def _size(path: Path) -> int:
    """Return the size of a file in bytes; -1 if it cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _expectations(metadata: Metadata) -> Iterator[MetadataIndex]:
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            yield from (MetadataIndex(name, chunk.offsets) for chunk in stored.chunks)
        else:
            yield MetadataIndex(name)


@contextlib.contextmanager
def collecting_index_problems(
    storage_writer: Any, inspect: Callable[[Any], list[str]], problems: list[str]
) -> Iterator[None]:
    """Within this context, the step that writes the index never raises on one rank while others wait.

    Args:
        storage_writer: the storage writer of this save.
        inspect: returns the problems on disk, by the index that has just been written; called on rank 0.
        problems: receives the errors of writing the index and the problems on disk.
    """
    finish = storage_writer.finish
    retrieve = storage_writer.retrieve_write_results

    def guarded_finish(metadata: Any, results: Any) -> None:
        problem = attempt(partial(finish, metadata, results))
        problems.extend(inspect(_with_records(metadata, results)) if problem is None else [problem])

    def guarded_retrieve() -> Any:
        try:
            return retrieve()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this rank's answer
            # Only the text of the error: frames of `multiprocessing` in a reference cycle crash CPython's collector
            # ("deallocated BytesIO object has exported buffers").
            return _wrap_exception(RuntimeError(text_of(error)))

    storage_writer.finish = guarded_finish
    storage_writer.retrieve_write_results = guarded_retrieve
    try:
        yield
    finally:
        del storage_writer.finish, storage_writer.retrieve_write_results
