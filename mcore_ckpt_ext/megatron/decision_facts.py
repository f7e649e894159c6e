"""Collects the facts of a load by Megatron's loop, live or simulated; refuses impossible loads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.collectives import attempt, is_first_rank
from mcore_ckpt_ext.formats.common_state import common_optimizers, scheduler_in, sharding_type
from mcore_ckpt_ext.formats.description import ARGUMENTS
from mcore_ckpt_ext.formats.legacy.ranks import LAYER_WISE_FILES
from mcore_ckpt_ext.formats.legacy.reader import NAME as LEGACY
from mcore_ckpt_ext.formats.views import is_before_first_step
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import placement_changes
from mcore_ckpt_ext.layout.weight_shards import check_gates
from mcore_ckpt_ext.megatron.live.compatibility import becomes_hybrid, check_optimizer_was_saved, check_tokens
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain, differing_arguments, kind_named
from mcore_ckpt_ext.megatron.load_facts import LoadFacts, Loop
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.param_group_compat import has_as_many_groups
from mcore_ckpt_ext.megatron.policy import ARGUMENT_CHECKS, LoadDecision, decide
from mcore_ckpt_ext.megatron.presentation import reasons_to_present
from mcore_ckpt_ext.optimizers.first_step import counts_no_step
from mcore_ckpt_ext.optimizers.table import FORMATS, unlabeled_format
from mcore_ckpt_ext.optimizers.unsupported import has_remainders


@dataclass(frozen=True)
class RunningJob:
    """A job that loads, live or simulated, as far as the decision depends on it.

    Attributes:
        chain: its optimizers.
        children: the number of optimizers in the chain; 1 if it is no chain.
        arguments: Megatron's arguments.
        version: the version of megatron-core.
        has_new_tokens: True if it has tokens without a row in the checkpoint.
    """

    chain: Chain
    children: int
    arguments: Any
    version: tuple[int, int]
    has_new_tokens: bool


def facts_of(session: LoadSession, job: RunningJob, common: Mapping[str, Any] | None) -> LoadFacts:
    """Return the facts of a load by Megatron's own loop.

    Args:
        session: the folder to load.
        job: the job.
        common: the common state; None if `sources.legacy_state_dict` presents the checkpoint to Megatron.

    Raises:
        CheckpointError: the job cannot resume the checkpoint, whatever its optimizer is.
    """
    running = JobArguments.of(vars(job.arguments))
    folder = session.folder
    chain = job.chain
    # Other loops save no arguments.
    is_foreign = common is None or ARGUMENTS not in common
    written = session.checkpoint.job.arguments() if is_foreign else JobArguments.of(vars(common[ARGUMENTS]))  # type: ignore[index]
    check_optimizer_was_saved(written, str(folder))
    facts = LoadFacts(
        Loop.LEGACY,
        job.version,
        chain=chain,
        written=written,
        running=running,
        differing_arguments=lambda: _differing_arguments(session, written, chain, job.arguments),
        stored_groups=stored_groups(session),
        has_new_tokens=job.has_new_tokens,
    )
    if common is None:
        return replace(
            facts,
            blockers=reasons_to_present(session, job.arguments, job.version),
            has_own_files=lambda: _has_own_files(folder, chain, job.arguments),
        )
    check_tokens(written.tokens, running, folder)
    check_gates(written, running, str(folder))
    return replace(
        facts,
        loop=Loop.MEGATRON,
        optimizer_format=_format_of(session, common, written, chain),
        # Without arguments stock Megatron assumes that the checkpoint has layout TP1 x PP1.
        is_moved=is_foreign or becomes_hybrid(written, running) or bool(placement_changes(written, running)),
        optimizer_counts=(len(common_optimizers(common)), job.children),
        has_as_many_groups=lambda: has_as_many_groups(common, chain),
        is_before_first_step=lambda: _is_before_first_step(session, common),
    )


def decision_on(facts: LoadFacts) -> LoadDecision | None:
    """Decide who loads; None if there is no optimizer state that this package could fill."""
    decision = decide(facts)
    is_known = facts.loop is Loop.LEGACY or bool(facts.chain.whole) or facts.optimizer_format in FORMATS
    return decision if is_known or decision.reason in ARGUMENT_CHECKS else None


def stored_groups(session: LoadSession) -> Callable[[], Sequence[Mapping[str, Any]]]:
    """Return a function that reads a checkpoint's parameter groups once, when a check first needs them.

    It returns them on rank 0, which reads for all, and an empty list on the other ranks.
    """

    @functools.cache
    def groups() -> Sequence[Mapping[str, Any]]:
        param_groups: list[Mapping[str, Any]] = []
        if is_first_rank():
            attempt(
                lambda: param_groups.extend(session.checkpoint.optimizer.param_groups())
            )  # stock Megatron reports the error
        return param_groups

    return groups


def _is_before_first_step(session: LoadSession, common: Mapping[str, Any]) -> bool:
    """Return True if the optimizer was saved before its first step; rank 0 reads it for all."""
    may_be = counts_no_step(scheduler_in(common)) and is_first_rank()
    return may_be and is_before_first_step(session.checkpoint)


def _format_of(session: LoadSession, common: Mapping[str, Any], written: JobArguments, chain: Chain) -> str | None:
    """Return the stored optimizer format, by the label in the common state if that suffices."""
    label = sharding_type(common)
    # A layer-wise optimizer may have a distributed optimizer's label: then the keys decide.
    if not chain.whole or written.use_distributed_optimizer:
        return label
    return session.checkpoint.optimizer.format() if label else unlabeled_format()


def _has_own_files(folder: Path, chain: Chain, arguments: Any) -> bool:
    """Return True if every rank with a layer-wise optimizer finds its own file in a legacy folder.

    For other optimizers: return True if the folder has no such files. Each rank reads the file of its own data-parallel
    rank, with `--ckpt-format torch` only; with other formats all ranks get the part of the first (`save_checkpoint`,
    `load_checkpoint`, checkpointing.py, 0.16.1 to 0.19.2).
    """
    files = len(list(folder.glob(f"mp_rank_*/{LAYER_WISE_FILES}")))
    if not any(layer_wise is not None for _, layer_wise in chain.whole):
        return not files
    return bool(arguments.ckpt_format == LEGACY and files == arguments.world_size)


def _differing_arguments(session: LoadSession, written: JobArguments, chain: Chain, arguments: Any) -> Sequence[str]:
    def stored_remainders() -> bool:
        index = session.checkpoint.files.index()
        return index is not None and has_remainders(index)

    return differing_arguments(chain, written, kind_named(vars(arguments)), stored_remainders)
