"""Compares the bytes of tensors that a folder stores twice."""

from __future__ import annotations

from math import prod

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.hugging_face.folder import StoredTensor
from mcore_ckpt_ext.planning.array_location import QuantizedMatrix
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.transfer import Transfer

_BLOCK = 1 << 24


def same_bytes(reader: FolderReader, transfer: Transfer, one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two tensors of one shape have the same dtype and bytes.

    Raises:
        UnsupportedCheckpointError: one of them is quantized.
    """
    if isinstance(one.extent, QuantizedMatrix) or isinstance(other.extent, QuantizedMatrix):
        raise UnsupportedCheckpointError(
            "two tied tensors are quantized and cannot be compared",
            where=str(reader.folder),
            hint="use the model's bf16 release, or dequantize it first",
        )
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
