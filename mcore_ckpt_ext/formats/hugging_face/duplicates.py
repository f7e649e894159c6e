"""Compares the bytes of tensors that a folder stores twice, and reports tensors that are not read."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, join_some
from mcore_ckpt_ext.formats.hugging_face.folder import StoredTensor
from mcore_ckpt_ext.planning.array_location import ScaleCodec
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.transfer import Transfer

_BLOCK = 1 << 24
_OUTPUT_LAYER, _SHOWN = "lm_head.weight", 6


def same_bytes(reader: FolderReader, transfer: Transfer, one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors of one shape have the same dtype and bytes.

    Raises:
        UnsupportedCheckpointError: one of them is quantized.
    """
    if isinstance(one.extent, ScaleCodec) or isinstance(other.extent, ScaleCodec):
        raise UnsupportedCheckpointError(
            "two tied tensors are quantized and cannot be compared", where=str(reader.folder),
            hint="use the model's bf16 release, or dequantize it first",
        )  # fmt: skip
    places = []
    for tensor in (one, other):
        payload = transfer.locate(tensor.extent)
        places.append((payload.file, payload.offset + tensor.first * payload.dtype.itemsize, payload.dtype))
    if places[0][2] != places[1][2]:
        return False
    total = prod(one.shape) * places[0][2].itemsize
    return places[0] == places[1] or all(
        len({reader.read(file, at + start, min(_BLOCK, total - start)) for file, at, _ in places}) == 1
        for start in range(0, total, _BLOCK)
    )


def left_out_notes(names: Sequence[str], is_tied: bool) -> list[str]:
    """Return notes on the tensors of a folder that are not read.

    Args:
        names: their names.
        is_tied: the output layer is tied to the embedding, so that a stored one is a copy.
    """
    copies = [name for name in names if is_tied and name == _OUTPUT_LAYER]
    others = [name for name in names if name not in copies]
    found = [f"{name} is not read: the output layer is tied to the embedding" for name in copies]
    return found + ([f"left out, no equivalent in Megatron: {join_some(others, _SHOWN)}"] if others else [])
