"""Plans a resume before anything is written, in phases for ranks of a job and for simulated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.differences import naming_differences
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.weight_shards import check_gates
from mcore_ckpt_ext.megatron.live.compatibility import (
    check_adapters,
    check_kinds,
    check_lost,
    check_names,
    check_precision,
    check_stored_once,
    check_tokens,
    name_map_for,
    verify_checksums,
)
from mcore_ckpt_ext.megatron.live.job import check_same_kinds
from mcore_ckpt_ext.megatron.live.param_groups import carried_groups, with_step
from mcore_ckpt_ext.megatron.live.phases import Phase, Who
from mcore_ckpt_ext.megatron.live.reading import OwnShard, Reading
from mcore_ckpt_ext.megatron.live.resume import Resume
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.optimizers.digests import check_digests
from mcore_ckpt_ext.optimizers.groups import Group
from mcore_ckpt_ext.storage.dtypes import with_torch_dtypes


def open_for_job(resume: Resume) -> None:
    """Open the checkpoint with the evidence of the live model, under the names of the live model.

    Raises:
        CheckpointError: it cannot be read, or a hybrid model cannot resume from this GPT.
    """
    resume.open_in_order(str)
    spell = name_map_for(resume.checkpoint, resume.live_names(), resume.running)
    if spell is not str:
        resume.open_in_order(spell)


def check_job(resume: Resume) -> None:
    """Refuse a job that cannot resume a checkpoint, by checks that do not depend on single ranks' shards.

    Raises:
        CheckpointError: see the checks of `compatibility`.
    """
    checkpoint = resume.checkpoint
    running = resume.running
    check_same_kinds(resume.summaries)
    check_stored_once(checkpoint)
    with naming_differences(checkpoint.job.arguments(), running):
        check_names(checkpoint, set(map(resume.spell, resume.live_names())))
    check_tokens(checkpoint.job.tokens, running, checkpoint.files.folder)
    check_gates(checkpoint.job.arguments(), running, str(checkpoint.files.folder))
    check_adapters(checkpoint, ParallelLayout.from_arguments(running), running)


def check_recorded_digests(resume: Resume, rank: int, ranks: int) -> None:
    """Compare this rank's share of the optimizer's state with the digests that the sidecar recorded.

    Raises:
        ProofError: some state differs.
    """
    for buffers in resume.checkpoint.optimizer.state().buffers:
        check_digests(buffers, str(resume.checkpoint.files.folder), (rank, ranks))


@dataclass(frozen=True)
class RankPlan(Generic[OwnShard]):
    """The read plan of one rank, and the values of its parameter groups, by optimizer."""

    reading: Reading[OwnShard]
    groups: list[list[dict[str, Any]]]


def plan_rank(resume: Resume, shards: Sequence[OwnShard], groups: Sequence[Sequence[Group]]) -> RankPlan[OwnShard]:
    """Plan the reads of one rank; only metadata and samples are read.

    Args:
        resume: the resume, whose checkpoint is open.
        shards: the shards of the rank's optimizers.
        groups: the parameter groups of each of its optimizers.

    Raises:
        CheckpointError: the checkpoint does not have what the rank needs.
    """
    checkpoint = resume.checkpoint
    options = resume.options
    with naming_differences(checkpoint.job.arguments(), resume.running):
        for shard in shards:
            check_kinds(checkpoint, shard)
            check_precision(checkpoint, shard)
        reading = Reading(checkpoint, shards, options.accept_lost)
    stored = with_torch_dtypes(stored_groups(checkpoint))
    return RankPlan(reading, [carried_groups(live, stored, options.own_bounds) for live in groups])


def stored_groups(checkpoint: CheckpointView) -> Any:
    """Return the stored parameter groups with Adam's step, which some formats keep elsewhere."""
    return with_step(
        checkpoint.optimizer.param_groups(), checkpoint.job.common(), checkpoint.job.arguments().global_batch_size
    )


# The phases that every loop performs on an open checkpoint.
CHECKSUMS = Phase(
    "planning the resume",
    Who.EACH_SHARE,
    lambda resume, rank, ranks: verify_checksums(resume.checkpoint, rank, ranks),
    applies=lambda resume: bool(resume.options.verify_all),
)
LOST_STATE = Phase(
    "planning the resume",
    Who.EVERY_RANK,
    lambda resume: check_lost(resume.checkpoint),
    applies=lambda resume: not resume.options.accept_lost,
)
RECORDED_DIGESTS = Phase("planning the resume", Who.EACH_SHARE, check_recorded_digests)
PLAN = Phase("planning the resume", Who.EACH_RANK, lambda resume, performer: performer.plan(resume))

PREPARING = (
    Phase(
        "reading the live model",
        Who.EACH_RANK,
        lambda resume, performer: performer.read_model(resume),
        collect=lambda resume, performer, summaries: setattr(resume, "summaries", summaries),
    ),
    Phase("opening the checkpoint", Who.EVERY_RANK, open_for_job),
    Phase("opening the checkpoint", Who.EACH_RANK, lambda resume, performer: performer.rename(resume)),
    Phase(
        "describing the live weights",
        Who.EACH_RANK,
        lambda resume, performer: performer.weight_specs(),
        collect=lambda resume, performer, specs: resume.take_weights(specs),
        applies=lambda resume: not resume.checkpoint.names(WEIGHT),
    ),
    Phase("planning the resume", Who.EVERY_RANK, check_job),
    CHECKSUMS,
    LOST_STATE,
    RECORDED_DIGESTS,
    PLAN,
    Phase(
        "planning what is read once",
        Who.EACH_RANK,
        lambda resume, performer: performer.wanted_bytes(),
        collect=lambda resume, performer, requested: performer.share(requested),
        applies=lambda resume: bool(resume.options.read_once),
    ),
)
"""What precedes the load of the weights: nothing is changed yet."""
VERIFYING = Phase(
    "proving the masters against the weights", Who.EACH_RANK, lambda resume, performer: performer.verify_masters(resume)
)
FILLING = Phase(
    "writing the optimizer",
    Who.EACH_RANK,
    lambda resume, performer: performer.fill(resume),
    consequence="it is partly written: do not train on, start again",
    collect=lambda resume, performer, filled: performer.finish(resume, filled),
    writes=True,
)
