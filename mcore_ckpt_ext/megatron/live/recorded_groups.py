"""Describes the gradient buffers of a running job as a sidecar records them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mcore_ckpt_ext.collectives import attempt
from mcore_ckpt_ext.layout.sidecar import RecordedBucket, RecordedGroup, RecordedParameter, order_digests
from mcore_ckpt_ext.megatron.live.digests import first_instances
from mcore_ckpt_ext.megatron.live.model import Chunks, LiveParameter, live_parameters


def recorded_groups(chunks: Chunks, optimizer: Any) -> list[RecordedGroup]:
    """Return this rank's part of the sidecar: the groups of which it is the first data-parallel rank.

    Attributes used, present from core_v0.7.0 to 0.19.2: `buffers`, `data_parallel_group_idx` of the
    DistributedOptimizer; `param_index_map`, `buckets` of its buffers (param_and_grad_buffer.py).
    """
    writers = [item for item in first_instances(optimizer) if item[1].data_parallel_group.rank() == 0]
    live = live_parameters(chunks) if writers else {}
    return [
        RecordedGroup(number, (child.data_parallel_group_idx,), tuple(_buckets(child, live)))
        for number, child in writers
    ]


def packs_otherwise(recorded: Mapping[tuple[int, int], str], chunks: Chunks, optimizer: Any) -> bool:
    """Return True if a sidecar gives parameters other places in this rank's buffers.

    Args:
        recorded: the result of `order_digests` for the sidecar.
        chunks: the unwrapped model chunks.
        optimizer: the live optimizer; False if this package does not support it: stock Megatron may load it.
    """
    live: dict[tuple[int, int], str] = {}
    attempt(lambda: live.update(order_digests(recorded_groups(chunks, optimizer))))
    return any(recorded.get(group, order) != order for group, order in live.items())


def _buckets(optimizer: Any, live: Mapping[int, LiveParameter]) -> Iterable[RecordedBucket]:
    for index, buffer in enumerate(optimizer.buffers):
        for bucket in buffer.buckets:
            parameters = [
                RecordedParameter(live[id(parameter)].regions[0].name, start - bucket.offset, stop - bucket.offset)
                for parameter, (start, stop, bucket_id) in buffer.param_index_map.items()
                if bucket_id == bucket.bucket_id
            ]
            yield RecordedBucket(
                buffer=index,
                dtypes=str((buffer.param_dtype, buffer.grad_dtype)),
                bucket=bucket.bucket_id,
                numel=bucket.grad_data.numel(),
                numel_unpadded=bucket.numel_unpadded,
                parameters=tuple(sorted(parameters, key=lambda parameter: parameter.start)),
            )
