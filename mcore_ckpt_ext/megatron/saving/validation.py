"""What a job has written, by the index of its checkpoint: every record by some rank, and every file in full."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from mcore_ckpt_ext.collectives import attempt, text_of


def stored_bytes(metadata: Metadata) -> int:
    """Bytes of all records of a checkpoint."""
    return sum(record.length for record in (metadata.storage_data or {}).values())


def problems_on_disk(metadata: Metadata, folder: Path) -> Iterator[str]:
    """What is missing from a checkpoint, by the index just written: records no rank wrote, files missing or cut off.

    Megatron itself counts the answers of each rank's writers, not what they wrote, and looks at no file.
    """
    records: dict[MetadataIndex, Any] = metadata.storage_data or {}
    # Which they are is asked only when the numbers differ: a large checkpoint has hundreds of thousands.
    entries = metadata.state_dict_metadata.values()
    planned = sum(len(entry.chunks) if isinstance(entry, TensorStorageMetadata) else 1 for entry in entries)
    lacking = [index for index in _expected(metadata) if index not in records] if planned != len(records) else []
    if lacking:
        total = len(lacking) + len(records)
        yield f"{len(lacking)} of {total} records were not written by any rank, first {lacking[0].fqn}"
    needed: dict[str, int] = {}
    for record in records.values():
        needed[record.relative_path] = max(needed.get(record.relative_path, 0), record.offset + record.length)
    for file, size in needed.items():
        found = _size(folder / file)
        if found < size:
            is_there = "it does not exist" if found < 0 else f"{found:,} bytes"
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


@contextlib.contextmanager
def judged(storage_writer: Any, judge: Callable[[Any], list[str]], troubles: list[str]) -> Iterator[None]:
    """Within this context, the step that writes the index never raises on one rank alone and leaves others waiting.

    Args:
        storage_writer: torch's, of this save.
        judge: says what is wrong on the disk, by the index that has just been written; asked on rank 0.
        troubles: gets what went wrong in writing the index, or by that judgement.
    """
    finish, retrieve = storage_writer.finish, storage_writer.retrieve_write_results

    def guarded_finish(metadata: Any, results: Any) -> None:
        trouble = attempt(partial(finish, metadata, results))
        troubles.extend(judge(metadata) if trouble is None else [trouble])

    def guarded_retrieve() -> Any:
        try:
            return retrieve()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this rank's answer
            # Its words only: frames of `multiprocessing` in a cycle of references crash CPython's collector
            # ("deallocated BytesIO object has exported buffers").
            return _wrap_exception(RuntimeError(text_of(error)))

    storage_writer.finish, storage_writer.retrieve_write_results = guarded_finish, guarded_retrieve
    try:
        yield
    finally:
        del storage_writer.finish, storage_writer.retrieve_write_results
