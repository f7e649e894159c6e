"""Rehearses a resume: the steps of a live job in order, with simulated ranks, up to the first write."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError, join_some, reraise_as_unreadable
from mcore_ckpt_ext.families.forward_pass import refuse_unknown_names
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.common_state import scheduler_in
from mcore_ckpt_ext.formats.target import version_number
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.master_check import BY_ROUNDING
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.megatron.decision_facts import decision_on, facts_of_common, facts_of_presented
from mcore_ckpt_ext.megatron.live.compatibility import check_lost, verify_checksums
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import kind_named
from mcore_ckpt_ext.megatron.live.param_groups import takes_own_bounds
from mcore_ckpt_ext.megatron.live.planning import LIVE_MODEL, check_job, open_with_orders
from mcore_ckpt_ext.megatron.new_tokens import new_tokens, refusal
from mcore_ckpt_ext.megatron.probe import check_complete, probe_checkpoint
from mcore_ckpt_ext.megatron.sources.legacy_state_dict import lacks_common_file
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.known_arguments import unknown_arguments, with_shown_arguments
from mcore_ckpt_ext.operations.layout_plan import check_gpus
from mcore_ckpt_ext.operations.workers import SingleProcess, Team
from mcore_ckpt_ext.optimizers.unsupported import has_remainders
from mcore_ckpt_ext.rehearsal.agreement import RefusedError, by_rank, on_every_rank
from mcore_ckpt_ext.rehearsal.data_parallel import DataParallelRanks
from mcore_ckpt_ext.rehearsal.groups import simulated_groups
from mcore_ckpt_ext.rehearsal.optimizers import simulated_chain
from mcore_ckpt_ext.rehearsal.ranks import SimulatedJob, dtype_of
from mcore_ckpt_ext.rehearsal.result import SCHEMA, Rehearsal
from mcore_ckpt_ext.rehearsal.scheduler import scheduler_refusal
from mcore_ckpt_ext.rehearsal.shares import PLANNING, Shares
from mcore_ckpt_ext.rehearsal.target import TargetJob, check_changes, target_job
from mcore_ckpt_ext.settings import VERIFY_ALL
from mcore_ckpt_ext.storage.checkpoint_dirs import TRACKER_FILE, iteration_folder, iteration_number
from mcore_ckpt_ext.storage.dcp_index import SharedIndex, using_index
from mcore_ckpt_ext.storage.gc_pause import collector_paused
from mcore_ckpt_ext.storage.paths import as_path
from mcore_ckpt_ext.versions import Version

# Modes of Megatron with their own optimizers.
_WITHOUT_DISTRIBUTED = ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
_PROBING = "looking at the checkpoint"
STOCK, PACKAGE = "stock Megatron", "mcore_ckpt_ext"


def rehearse(
    path: str | os.PathLike[str],
    gpus: int,
    sizes: Mapping[str, int],
    *,
    megatron_version: str | None = None,
    full: bool = False,
    arguments: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    any_change: bool = False,
    team: Team | None = None,
) -> Rehearsal:
    """Simulate a resume under another layout up to its first write, for all ranks, without Megatron.

    Args:
        path: a run folder (its newest iteration) or an iteration folder.
        gpus: number of GPUs.
        sizes: the size of each dimension, by its name in `ParallelLayout`; see `target.sizes_in`.
        megatron_version: the release that would run; by default the installed one, or else the newest known one.
        full: whether to compare all masters with their weights, not only samples.
        arguments: arguments of the job that wrote the checkpoint, if the checkpoint does not store them.
        changes: arguments of the resuming job that differ, other than its layout.
        any_change: whether all arguments may be changed, if the shapes of the checkpoint's model are unchanged.
        team: the processes that share the work, each with the same arguments; by default only this one.

    Raises:
        UsageError: an argument has an invalid value.
        CheckpointError: the checkpoint cannot be read, or a rehearsal does not support the job.
    """
    refuse_unknown_names(arguments or {})
    if not any_change:
        check_changes(changes or {})
    check_gpus(gpus)
    version = version_number(megatron_version)
    with reraise_as_unreadable(path), collector_paused(), ExitStack() as sharing:
        plain = Rehearsal(SCHEMA, str(path), gpus, "not known", _in_words(sizes), str(version))
        try:
            sharing.enter_context(using_index(_probe(as_path(path))))
            folder = iteration_folder(as_path(path))
            plain = replace(plain, path=str(folder))
            checkpoint = on_every_rank(_PROBING, gpus, lambda: _opened(folder))
            written = with_shown_arguments(checkpoint, checkpoint.arguments.replace(**(arguments or {})))
            plain = replace(plain, old_layout=str(ParallelLayout.from_arguments(written)))
            job = on_every_rank(
                PLANNING, gpus, lambda: target_job(checkpoint, written, gpus, sizes, version, changes or {}),
                beyond_rehearsal=(UnsupportedCheckpointError, UsageError),
            )  # fmt: skip
        except RefusedError as refused:
            return _refused(plain, refused)
        plain = replace(
            plain, new_layout=str(job.layout), iteration=checkpoint.iteration,
            optimizer_format=checkpoint.optimizer_format, flags=job.flags,
        )  # fmt: skip
        if job.refused is not None:
            return replace(plain, refusal=f"Megatron does not accept this layout: {job.refused}")
        tokens = new_tokens(checkpoint.vocabulary_rows, Namespace(**job.arguments.raw))
        if tokens:
            return replace(plain, refusal=str(refusal(tokens, str(folder.parent))), is_verbatim=True)
        return _Rehearsing(folder, written, job, version, plain, team or SingleProcess()).result(full=full)


class _Rehearsing:
    """The steps after the first look at a checkpoint, as in `megatron/load.py` and `optimizer_reshard`."""

    def __init__(
        self, folder: Path, written: JobArguments, job: TargetJob, version: Version, plain: Rehearsal, team: Team
    ) -> None:
        self._folder, self._written, self._job, self._version, self._plain = folder, written, job, version, plain
        self._team = team
        # Whether the job itself plans the resume; until this is decided, errors are those of all loads.
        self._plans = True

    def result(self, *, full: bool) -> Rehearsal:
        try:
            return self._done(full=full)
        except RefusedError as refused:
            found = _refused(self._plain, refused)
            # Stock Megatron, and the master check after its load, have messages of their own.
            return replace(found, is_verbatim=found.is_verbatim and self._plans)

    def _done(self, *, full: bool) -> Rehearsal:
        ranks, running = self._job.layout.world, self._job.arguments
        on_every_rank(_PROBING, ranks, self._inspect)
        view = SimulatedJob(open_checkpoint(self._folder), running, self._version).view
        checkpoint = on_every_rank("opening the checkpoint", ranks, lambda: open_with_orders(self._folder, [view]))
        if checkpoint.optimizer_format is None:
            raise UnsupportedCheckpointError(
                "there is nothing to rehearse: the checkpoint has no optimizer state that this version reads",
                where=str(self._folder),
                hint="start the job: stock Megatron loads weights under any layout",
            )
        simulated = SimulatedJob(checkpoint, running, self._version)
        on_every_rank(PLANNING, ranks, lambda: check_job(checkpoint, [view], str, running))
        if VERIFY_ALL.value:
            by_rank(PLANNING, ranks, lambda rank: verify_checksums(checkpoint, rank, ranks))
        on_every_rank(PLANNING, ranks, lambda: check_lost(checkpoint))
        # Each rank recovers the packing of the buffers that it needs; with one pipeline stage, it needs all.
        needs_all = self._job.layout.pipeline == 1 and not simulated.models.has_expert_optimizer
        on_every_rank(PLANNING, ranks, lambda: simulated.trained, is_verbatim=needs_all)
        shares = Shares(
            simulated, checkpoint, on_every_rank(PLANNING, ranks, lambda: self._groups(checkpoint)),
            DataParallelRanks(simulated, checkpoint, self._version),
            own_bounds=takes_own_bounds(running.raw, self._version), team=self._team,
        )  # fmt: skip
        shares.plan()
        shares.find_weights()
        shares.prove(full=full)
        figures = shares.figures
        schedule = scheduler_in(checkpoint.common)
        if isinstance(schedule, Mapping) and (reason := scheduler_refusal(schedule, running)) is not None:
            return replace(self._plain, refusal=reason)
        return replace(
            self._plain, will_succeed=True, parameters=len(figures.names), parts=figures.parts,
            elements=figures.elements, weights=figures.weights, bytes_read=figures.bytes_read,
            proven=figures.proven, proof=_proof(checkpoint), is_full_proof=full,
            order_sources=_extra_parameter_orders(checkpoint), given=tuple(self._given(checkpoint, simulated)),
        )  # fmt: skip

    def _inspect(self) -> None:
        """Do the checks before a load, and decide which loader loads the optimizer (`load_decision`)."""
        running, folder, checkpoint = self._job.arguments, self._folder, open_checkpoint(self._folder)
        groups, arguments = self._groups(checkpoint), Namespace(**running.raw)
        index = checkpoint.format_reader.index
        dtypes = {checkpoint.named_tensor(WEIGHT, name).dtype for name in checkpoint.names(WEIGHT)}
        chain = simulated_chain(
            running, groups, {dtype_of(dtype, running) for dtype in dtypes},
            has_remainders=index is not None and has_remainders(index),
        )  # fmt: skip
        if not checkpoint.format_reader.is_loaded_as_stored or lacks_common_file(folder, self._version):
            facts = facts_of_presented(folder, chain, arguments, self._version, has_new_tokens=False)
        else:
            common = checkpoint.common
            facts = facts_of_common(
                folder, common, chain, len(groups), arguments, self._version, has_new_tokens=False
            )  # fmt: skip
        decision = decision_on(facts)
        # Other optimizers than Adam are not simulated.
        if decision is not None and kind_named(running.raw) in (None, "adam"):
            loader = STOCK if decision.is_stock else PACKAGE
            check = decision.check
            why = None if check is None else f"{check.name}; stock Megatron cannot do this: {check.consequence}"
            self._plain = replace(self._plain, loaded_by=loader, why=why)
            # If Megatron wrote the state shifted, the job plans after the load by stock Megatron (`check_after_load`).
            self._plans = not decision.is_stock or bool(checkpoint.optimizer.shifted)

    def _groups(self, checkpoint: CheckpointView) -> list[list[dict[str, Any]]]:
        apart, running = self._job.layout.expert > 1, self._job.arguments
        return simulated_groups(checkpoint.param_groups(), self._written, running, has_expert_optimizer=apart)

    def _given(self, checkpoint: CheckpointView, simulated: SimulatedJob) -> Iterator[str]:
        if self._plain.loaded_by is None:
            yield "who loads the optimizer, stock Megatron or this package, is decided by the job: it is not simulated"
        yield "the job builds the model, and its optimizer, by the same arguments as the job that wrote the checkpoint"
        yield "not rehearsed: random states, extra states of modules, warm-up and decay, tokenizer, data, and memory"
        for name in _WITHOUT_DISTRIBUTED:
            if self._job.arguments.raw.get(name):
                yield f"the job runs without --{name.replace('_', '-')}: that optimizer is not simulated"
        if unknown := unknown_arguments(self._written):
            yield f"Megatron accepts the layout as far as it depends on {', '.join(unknown)}: not stored (--argument)"
        tokens = self._job.arguments.tokens or checkpoint.tokens
        if tokens is None and checkpoint.vocabulary_rows is not None:
            yield "its tokenizer has no tokens beyond the rows of the checkpoint: how many there are is not stored"
        if simulated.frozen:
            yield f"parameters without optimizer state are frozen in the job, too: {join_some(simulated.frozen, 3)}"


def _opened(folder: Path) -> CheckpointView:
    checkpoint = open_checkpoint(folder)
    _ = checkpoint.common, checkpoint.arguments, checkpoint.layout, checkpoint.iteration
    return checkpoint


def _probe(path: Path) -> SharedIndex | None:
    """Check that the iteration that a job would load is complete, as its first rank does.

    Returns:
        Its index, which is read once.

    Raises:
        RefusedError: it is incomplete, and another iteration is complete.
    """
    step = None if (path / TRACKER_FILE).exists() else iteration_number(path)
    run = str(path if step is None else path.parent)
    arguments = Namespace(load=run, ckpt_step=step)
    phase = "looking at what is to be loaded"
    probed = on_every_rank(phase, 1, lambda: probe_checkpoint(arguments, "load", run, shares_index=True))
    on_every_rank(phase, 1, lambda: check_complete(probed.health, run))
    return probed.index


def _extra_parameter_orders(checkpoint: CheckpointView) -> tuple[str, ...]:
    """Return the sources of the parameter order; the live model's order is that of its layer spec."""
    own = {LIVE_MODEL: "the order of the layer spec"}
    return tuple(own.get(label, label) for label in checkpoint.optimizer.order_sources())


def _proof(checkpoint: CheckpointView) -> str:
    proof = checkpoint.proof
    return "equal to their weights when rounded" if proof is BY_ROUNDING else proof.words


def _refused(plain: Rehearsal, refused: RefusedError) -> Rehearsal:
    return replace(plain, refusal=str(refused.error), is_verbatim=refused.is_verbatim)


def _in_words(sizes: Mapping[str, int]) -> str:
    labels = {"tensor": "TP", "pipeline": "PP", "virtual_pipeline": "VPP", "expert": "EP", "context": "CP"}
    return " x ".join(f"{label}{sizes[name]}" for name, label in labels.items() if sizes.get(name, 1) > 1) or "TP1"
