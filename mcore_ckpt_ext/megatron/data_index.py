"""Reads the files of a job's data set: the blend, the sizes, and the tokens in an index."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from mcore_ckpt_ext.continuity.data_files import RECORD, DataFiles
from mcore_ckpt_ext.continuity.data_set import training_blend
from mcore_ckpt_ext.job.job_arguments import JobArguments

_HEADER = "<9sQBQQ"
_MAGIC = b"MMIDIDX\x00\x00"


def tokens_of(path: str, share: float) -> int | None:
    """Return the tokens of the first share of a data set's sequences; None without an index (`.idx`).

    Documents of several sequences, into which `--split-sentences` divides them, are those of BERT, whose data sets are
    shuffled by another rule (`MaskedWordPieceDataset`, megatron/core/datasets/masked_dataset.py): they are not counted.

    Sources: `_IndexReader` (megatron/core/datasets/indexed_dataset.py) and
    `BlendedMegatronDatasetBuilder._build_megatron_dataset_splits`, core_v0.16.1 to 0.19.2 and the development head of
    August 2026. A job that is built for another number of samples counts them, too.

    Args:
        path: the path of the data set, without the ending.
        share: the share of the sequences that training has.
    """
    index = Path(f"{path}.idx")
    size = struct.calcsize(_HEADER)
    try:
        with index.open("rb") as file:
            magic, version, _, sequences, documents = struct.unpack(_HEADER, file.read(size))
        if (magic, version, documents) != (_MAGIC, 1, sequences + 1):
            return None
        lengths = numpy.memmap(index, numpy.int32, "r", size, (sequences,))
    except (OSError, ValueError, OverflowError, struct.error):
        return None
    return int(numpy.sum(lengths[: round(share * float(sequences))], dtype=numpy.int64))


def record_data_files(arguments: Any) -> None:
    """Record the content of the data set's files in the arguments that Megatron saves, on the first rank.

    Args:
        arguments: Megatron's arguments at the start of a job.
    """
    if getattr(arguments, "rank", 0) != 0:
        return
    words = _blend_in_file(arguments)
    of_blend = {name: getattr(arguments, name, None) for name in ("data_path", "train_data_path", "data_args_path")}
    blend = training_blend(JobArguments.of({**of_blend, RECORD: DataFiles(words).as_argument()}))
    files = DataFiles(words, _sizes_of(blend.paths if blend else ()))
    if files != DataFiles():
        setattr(arguments, RECORD, files.as_argument())


def _blend_in_file(arguments: Any) -> tuple[str, ...]:
    """Return the words for training in the file that names the blend; empty without one that can be read.

    Source: `get_blend_and_blend_per_split`, megatron/training/utils.py, core_v0.12.0 to 0.19.2.
    """
    try:
        if path := getattr(arguments, "data_args_path", None):
            return tuple(Path(path).read_text().split())
        if path := getattr(arguments, "per_split_data_args_path", None):
            words = json.loads(Path(path).read_text())["train"]
            return tuple(words.split() if isinstance(words, str) else map(str, words))
    except (OSError, ValueError, TypeError, LookupError):  # Megatron refuses it; or it lies in an object store
        pass
    return ()


def _sizes_of(paths: Sequence[str]) -> tuple[int, ...]:
    """Return the bytes of each data set, with its index; empty if any has no files (an object store)."""
    try:
        return tuple(_size_of(path) for path in paths)
    except (OSError, ValueError):
        return ()


def _size_of(path: str) -> int:
    if (conversations := Path(path)).is_file():  # those of `--sft`
        return conversations.stat().st_size
    return sum(Path(f"{path}{ending}").stat().st_size for ending in (".bin", ".idx"))
