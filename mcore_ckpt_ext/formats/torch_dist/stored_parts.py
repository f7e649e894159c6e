"""Lists the content of each file of a `torch_dist` checkpoint, from metadata alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.stored_parts import StoredParts
from mcore_ckpt_ext.formats.unread_state import OTHER, UNKNOWN, optimizer_kind
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, PARAM_REMAINDER, STALE_MASTER, WEIGHT
from mcore_ckpt_ext.optimizers.bucket_formats import BUCKET_KEY
from mcore_ckpt_ext.optimizers.flat_arrays import Buffers
from mcore_ckpt_ext.optimizers.model_space_state import STATE_KEY
from mcore_ckpt_ext.optimizers.stale_masters import are_stale, are_stale_in_buffer
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex

_GATHERED = ".param_state/shard_"


def parts_of_torch_dist(
    index: DcpIndex, buffers: Callable[[], Sequence[Buffers]], arguments: JobArguments
) -> Iterator[StoredParts]:
    """Yield an index's arrays and objects by Megatron's keys; `buffers` has the optimizer's flat ones."""
    for key, array in index.arrays.items():
        if array.chunks:
            yield StoredParts(_kind_of(key, index, arguments), key, array.files_and_bytes())
    gathered = [key for key in index.objects if _GATHERED in key]
    for key, stored in index.objects.items():
        if key not in gathered:
            yield StoredParts(OTHER, key, [(stored.file, stored.length)])
    if gathered:
        yield from _gather(index, gathered, buffers)


def _kind_of(key: str, index: DcpIndex, arguments: JobArguments) -> str:
    """Return the kind of the array stored under Megatron's sharded key."""
    kind = optimizer_kind(key)
    if kind == OTHER:
        return WEIGHT
    if kind != FP32_PARAM:
        return kind
    if index.arrays[key].dtype == "int16":
        return PARAM_REMAINDER
    return STALE_MASTER if _is_stale(key, index, arguments) else kind


def _is_stale(key: str, index: DcpIndex, arguments: JobArguments) -> bool:
    if match := BUCKET_KEY.match(key):
        return are_stale_in_buffer(arguments, match["dtypes"])
    match = STATE_KEY.match(key)
    weight = index.arrays.get(match["key"]) if match else None
    return are_stale(arguments, weight.dtype if weight else None)


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
