"""Lists the content of each file of a `torch_dist` checkpoint, from metadata alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.stored_parts import StoredParts
from mcore_ckpt_ext.formats.unread_state import OTHER, UNKNOWN, optimizer_kind
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, PARAM_REMAINDER, WEIGHT
from mcore_ckpt_ext.optimizers.flat_arrays import Buffers
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex

_GATHERED = ".param_state/shard_"


def kind_of(key: str) -> str:
    """Return the kind of the array stored under Megatron's sharded key."""
    kind = optimizer_kind(key)
    return WEIGHT if kind == OTHER else kind


def parts_of_torch_dist(index: DcpIndex, buffers: Callable[[], Sequence[Buffers]]) -> Iterator[StoredParts]:
    """Yield an index's arrays and objects by Megatron's keys; `buffers` has the optimizer's flat ones."""
    for key, array in index.arrays.items():
        kind = kind_of(key)
        if kind == FP32_PARAM and array.dtype == "int16":
            kind = PARAM_REMAINDER
        if array.chunks:
            yield StoredParts(kind, key, array.files_and_bytes())
    gathered = [key for key in index.objects if _GATHERED in key]
    for key, stored in index.objects.items():
        if key not in gathered:
            yield StoredParts(OTHER, key, [(stored.file, stored.length)])
    if gathered:
        yield from _gather(index, gathered, buffers)


def _gather(index: DcpIndex, keys: Sequence[str], buffers: Callable[[], Sequence[Buffers]]) -> Iterator[StoredParts]:
    """Yield whole buffers in pickled objects, or the objects themselves if their content cannot be read."""
    try:
        of_optimizer = buffers()
    except UnsupportedCheckpointError:
        for key in keys:
            yield StoredParts(UNKNOWN, key, [(index.objects[key].file, index.objects[key].length)])
    else:
        for flat_buffers in of_optimizer:
            yield from _flat(flat_buffers)


def _flat(buffers: Buffers) -> Iterator[StoredParts]:
    for (child, index), arrays in buffers.arrays.items():
        for (bucket, kind), flat in arrays.items():
            places = [(p.extent.file, (p.stop - p.start) * ITEM_SIZE[p.extent.dtype]) for p in flat.pieces]
            if places:
                yield StoredParts(kind, f"optimizer {child}, dp_group_idx_{index}.{bucket}", places)
