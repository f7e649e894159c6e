"""Counts the tokens of a data set in its index, the file `.idx` that Megatron's preprocessing writes."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy

_HEADER = "<9sQBQQ"
_MAGIC = b"MMIDIDX\x00\x00"


def tokens_of(path: str, share: float) -> int | None:
    """Return the tokens of the first share of a data set's sequences; None without an index.

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
