"""What each file holds: bytes by kind and tensor, from metadata alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.unread import OTHER, UNKNOWN, optimizer_kind
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, PARAM_REMAINDER, WEIGHT
from mcore_ckpt_ext.optimizers.flat_arrays import KINDS, Buffers
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.tensor_reference import TensorReference

if TYPE_CHECKING:
    from mcore_ckpt_ext.formats.colossalai.reader import ColossalAICheckpoint
    from mcore_ckpt_ext.formats.flattened import FlattenedCheckpoint
    from mcore_ckpt_ext.formats.legacy.reader import LegacyCheckpoint
    from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint
    from mcore_ckpt_ext.formats.view import CheckpointView

_GATHERED = ".param_state/shard_"


class StoredPart(NamedTuple):
    """`nbytes` of an array in a file; `tensor` is named as the file's own format names it."""

    file: str
    kind: str
    tensor: str
    nbytes: int


def kind_of(key: str) -> str:
    """The kind of the array stored under Megatron's sharded key."""
    kind = optimizer_kind(key)
    return WEIGHT if kind == OTHER else kind


def parts_of_torch_dist(checkpoint: TorchDistCheckpoint) -> Iterator[StoredPart]:
    """Arrays and objects of an index under Megatron's keys."""
    for key, array in checkpoint.index.arrays.items():
        kind, size = kind_of(key), ITEM_SIZE[array.dtype]
        if kind == FP32_PARAM and array.dtype == "int16":
            kind = PARAM_REMAINDER
        for chunk in array.chunks:
            yield StoredPart(chunk.extent.file, kind, key, chunk.extent.numel * size)
    gathered = [key for key in checkpoint.index.objects if _GATHERED in key]
    for key, stored in checkpoint.index.objects.items():
        if key not in gathered:
            yield StoredPart(stored.file, OTHER, key, stored.length)
    if gathered:
        yield from _gathered(checkpoint, gathered)
    if checkpoint.has_weights_elsewhere:
        yield from parts_by_name(checkpoint.view, [WEIGHT])


def parts_of_flattened(checkpoint: FlattenedCheckpoint) -> Iterator[StoredPart]:
    """Arrays and objects of an index under torch's own keys."""
    for key, array in checkpoint.stored_index.arrays.items():
        for chunk in array.chunks:
            nbytes = chunk.extent.numel * ITEM_SIZE[array.dtype]
            yield StoredPart(chunk.extent.file, checkpoint.kind_of(key), key, nbytes)
    for key, stored in checkpoint.stored_index.objects.items():
        yield StoredPart(stored.file, OTHER, key, stored.length)


def _gathered(checkpoint: TorchDistCheckpoint, keys: list[str]) -> Iterator[StoredPart]:
    """Whole buffers in pickled objects; the objects themselves where their content cannot be read."""
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


def parts_of_colossalai(checkpoint: ColossalAICheckpoint) -> Iterator[StoredPart]:
    """States of ColossalAI's optimizer."""
    for shard in checkpoint.optimizer_shards:
        yield StoredPart(shard.file, shard.kind, f"{shard.kind} of parameter {shard.parameter}", shard.nbytes)


def parts_of_legacy(checkpoint: LegacyCheckpoint) -> Iterator[StoredPart]:
    """Tensors in the pickles of all ranks."""
    for file, _, content in checkpoint.rank_files():
        for path, tensor in _tensors(content, ()):
            kind = _legacy_kind(path)
            yield StoredPart(file, kind, ".".join(path), prod(tensor.shape) * tensor.storage.dtype.itemsize)


def _legacy_kind(path: tuple[str, ...]) -> str:
    if re.fullmatch(r"model\d*", path[0]):
        return WEIGHT
    if "fp32_from_fp16_params" in path:
        return FP32_PARAM
    if path[0] == "optimizer" or path[0].isdigit():
        return KINDS.get(path[-1], path[-1])
    return OTHER


def _tensors(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], TensorReference]]:
    if isinstance(tree, TensorReference):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _tensors(value, (*path, str(key)))
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from _tensors(value, (*path, str(number)))


def parts_by_name(checkpoint: CheckpointView, kinds: Sequence[str] | None = None) -> Iterator[StoredPart]:
    """Every slice of every tensor; of some `kinds` only."""
    for kind in checkpoint.kinds() if kinds is None else kinds:
        for name in checkpoint.names(kind):
            for stored in checkpoint.stored(kind, name):
                yield StoredPart(stored.extent.file, kind, name, stored.slice.numel * ITEM_SIZE[stored.extent.dtype])
