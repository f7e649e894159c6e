"""Lists the content of each file of a `torch_dist` checkpoint, from metadata alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.stored_parts import StoredPart, parts_by_name
from mcore_ckpt_ext.formats.unread_state import OTHER, UNKNOWN, optimizer_kind
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, PARAM_REMAINDER, WEIGHT
from mcore_ckpt_ext.optimizers.flat_arrays import Buffers
from mcore_ckpt_ext.planning.plan import ITEM_SIZE

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint

_GATHERED = ".param_state/shard_"


def kind_of(key: str) -> str:
    """Return the kind of the array stored under Megatron's sharded key."""
    kind = optimizer_kind(key)
    return WEIGHT if kind == OTHER else kind


def parts_of_torch_dist(checkpoint: TorchDistCheckpoint) -> Iterator[StoredPart]:
    """Yield the arrays and objects of an index by Megatron's keys."""
    for key, array in checkpoint.index.arrays.items():
        kind, size = kind_of(key), ITEM_SIZE[array.dtype]
        if kind == FP32_PARAM and array.dtype == "int16":
            kind = PARAM_REMAINDER
        for file, numel in array.places():
            yield StoredPart(file, kind, key, numel * size)
    gathered = [key for key in checkpoint.index.objects if _GATHERED in key]
    for key, stored in checkpoint.index.objects.items():
        if key not in gathered:
            yield StoredPart(stored.file, OTHER, key, stored.length)
    if gathered:
        yield from _gathered(checkpoint, gathered)
    if checkpoint.has_external_weights:
        yield from parts_by_name(checkpoint.view, [WEIGHT])


def _gathered(checkpoint: TorchDistCheckpoint, keys: list[str]) -> Iterator[StoredPart]:
    """Yield whole buffers in pickled objects, or the objects themselves if their content cannot be read."""
    try:
        of_optimizer = checkpoint.optimizer.buffers
    except UnsupportedCheckpointError:
        for key in keys:
            yield StoredPart(checkpoint.index.objects[key].file, UNKNOWN, key, checkpoint.index.objects[key].length)
    else:
        for buffers in of_optimizer:
            yield from _flat(buffers)


def _flat(buffers: Buffers) -> Iterator[StoredPart]:
    for (child, index), arrays in buffers.arrays.items():
        for (bucket, kind), flat in arrays.items():
            for piece in flat.pieces:
                label = f"optimizer {child}, dp_group_idx_{index}.{bucket}"
                size = ITEM_SIZE[piece.extent.dtype]
                yield StoredPart(piece.extent.file, kind, label, (piece.stop - piece.start) * size)
