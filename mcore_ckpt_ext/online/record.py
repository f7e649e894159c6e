"""The sidecar of a running job: its gradient-buffer layout, gathered once and written beside each checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.sidecar import (
    RecordedBucket,
    RecordedGroup,
    RecordedParameter,
    SaveRecord,
    Sidecar,
)
from mcore_ckpt_ext.online.live_optimizer import LiveParameter, distributed_optimizers, live_parameters


def recorded_groups(chunks: Sequence[Any], optimizer: Any) -> list[RecordedGroup]:
    """This rank's part of the sidecar: the groups of which it is the first data-parallel rank.

    Attributes used, present from core_v0.7.0 to 0.19.2: `buffers`, `data_parallel_group_idx` of the
    DistributedOptimizer; `param_index_map`, `buckets` of its buffers (param_and_grad_buffer.py).
    """
    children = getattr(optimizer, "chained_optimizers", [optimizer])
    writers = [
        (number, child)
        for number, child in enumerate(children)
        if child in (distributed_optimizers(optimizer) or [])
        and child.data_parallel_group.rank() == 0
        and getattr(child, "distributed_optimizer_instance_id", 0) == 0
    ]
    live = live_parameters(chunks) if writers else {}
    return [
        RecordedGroup(number, (child.data_parallel_group_idx,), tuple(_buckets(child, live)))
        for number, child in writers
    ]


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


def merged(groups: Iterable[RecordedGroup]) -> tuple[RecordedGroup, ...]:
    """Groups with equal buffers (tensor-parallel siblings) become one entry."""
    indices: dict[tuple[int, tuple[RecordedBucket, ...]], set[int]] = {}
    for group in groups:
        indices.setdefault((group.child, group.buckets), set()).update(group.indices)
    return tuple(RecordedGroup(child, tuple(sorted(found)), buckets) for (child, buckets), found in indices.items())


def sidecar_text(
    groups: Iterable[RecordedGroup],
    arguments: Mapping[str, Any],
    iteration: int,
    versions: tuple[str, str],
    saved: SaveRecord | None = None,
) -> str:
    """What the sidecar of a checkpoint says.

    Args:
        groups: merged groups of all ranks.
        arguments: Megatron's arguments of the run.
        iteration: the iteration saved.
        versions: of this package, and of megatron-core.
        saved: what the save took, once it is complete on disk.
    """
    written_by, megatron = versions
    layout = {name: int(size) for name, size in asdict(ParallelLayout.from_arguments(arguments)).items()}
    return Sidecar(f"mcore_ckpt_ext {written_by}", megatron, iteration, layout, tuple(groups), saved).to_json()
