"""Compares and plans a resume before anything is written, for ranks of a job and for simulated ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.views import with_first_moments
from mcore_ckpt_ext.job.differences import naming_differences
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.parameter_order import ObservedOrder
from mcore_ckpt_ext.layout.weight_shards import check_gates
from mcore_ckpt_ext.megatron.live.compatibility import (
    check_adapters,
    check_kinds,
    check_names,
    check_precision,
    check_stored_once,
    check_tokens,
)
from mcore_ckpt_ext.megatron.live.job import RankSummary, check_same_kinds
from mcore_ckpt_ext.megatron.live.model import NameFunction
from mcore_ckpt_ext.megatron.live.param_groups import carried_groups, with_step
from mcore_ckpt_ext.megatron.live.reading import OwnShard, Reading
from mcore_ckpt_ext.optimizers.groups import Group
from mcore_ckpt_ext.storage.dtypes import with_torch_dtypes

LIVE_MODEL = "the live model"
"""Name of an order source: the order in which the running job registers its parameters."""


def open_with_orders(folder: Path, views: Iterable[RankSummary], spell: NameFunction = str) -> CheckpointView:
    """Open a checkpoint with the parameter registration orders of the running job's ranks, if known."""
    orders = [list(map(spell, registered)) for view in views for registered in view.registered]
    order_sources = [ObservedOrder(LIVE_MODEL, orders)] if orders else []
    return with_first_moments(open_checkpoint(folder, order_sources=order_sources))


def check_job(
    checkpoint: CheckpointView, views: Sequence[RankSummary], spell: NameFunction, arguments: JobArguments
) -> None:
    """Refuse a job that cannot resume a checkpoint, by checks that do not depend on single ranks' shards.

    Raises:
        CheckpointError: see the checks of `compatibility`.
    """
    check_same_kinds(views)
    check_stored_once(checkpoint)
    with naming_differences(checkpoint.arguments, arguments):
        check_names(checkpoint, {spell(name) for view in views for name in view.names})
    check_tokens(checkpoint.tokens, arguments, checkpoint.folder)
    check_gates(checkpoint.arguments, arguments, str(checkpoint.folder))
    check_adapters(checkpoint, ParallelLayout.from_arguments(arguments), arguments)


@dataclass(frozen=True)
class RankPlan(Generic[OwnShard]):
    """The read plan of one rank, and the values of its parameter groups, by optimizer."""

    reading: Reading[OwnShard]
    groups: list[list[dict[str, Any]]]


def plan_rank(
    checkpoint: CheckpointView,
    shards: Sequence[OwnShard],
    groups: Sequence[Sequence[Group]],
    arguments: JobArguments,
    *,
    accept_lost: bool = False,
    own_bounds: bool = False,
) -> RankPlan[OwnShard]:
    """Plan the reads of one rank; only metadata and samples are read.

    Args:
        checkpoint: the checkpoint to resume.
        shards: the shards of the rank's optimizers.
        groups: the parameter groups of each of its optimizers.
        arguments: those of the running job.
        accept_lost: see `prepare`.
        own_bounds: see `carried_groups`.

    Raises:
        CheckpointError: the checkpoint does not have what the rank needs.
    """
    with naming_differences(checkpoint.arguments, arguments):
        for shard in shards:
            check_kinds(checkpoint, shard)
            check_precision(checkpoint, shard)
        reading = Reading(checkpoint, shards, accept_lost)
    stored = with_step(checkpoint.param_groups(), checkpoint.common, checkpoint.arguments.constant_batch_size)
    return RankPlan(reading, [carried_groups(own, with_torch_dtypes(stored), own_bounds) for own in groups])
