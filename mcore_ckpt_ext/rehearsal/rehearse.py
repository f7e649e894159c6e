"""Rehearses a resume: the steps of a live job in order, with simulated ranks, up to the first write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from mcore_ckpt_ext.communicator import ONE_PROCESS, Communicator
from mcore_ckpt_ext.continuity.mathematics import differences_of_jobs
from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError, join_some, reraise_as_unreadable
from mcore_ckpt_ext.families.passed_arguments import replaced_values, with_passed
from mcore_ckpt_ext.formats.accounts import account_of_load
from mcore_ckpt_ext.formats.target import version_number
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.job.dimensions import format_sizes
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.megatron.live.param_groups import takes_own_bounds
from mcore_ckpt_ext.megatron.live.resume import LIVE_MODEL, ResumeOptions
from mcore_ckpt_ext.megatron.load_phases import CHECKING, COMPLETENESS, DECIDING, LOOKING, RESUMING, MegatronResume
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.policy import Check
from mcore_ckpt_ext.operations.assumed_release import release_of
from mcore_ckpt_ext.operations.known_arguments import unknown_arguments, with_derived_arguments
from mcore_ckpt_ext.operations.layout_plan import check_gpus
from mcore_ckpt_ext.operations.options import Location, RehearsalOptions
from mcore_ckpt_ext.operations.stored_failures import stock_failure
from mcore_ckpt_ext.optimizers.stock_failures import SHIFTED_PARAMETERS, StockFailure
from mcore_ckpt_ext.rehearsal.agreement import RefusedError, SimulatedCommunicator, all_read_alike
from mcore_ckpt_ext.rehearsal.ranks import SimulatedJob
from mcore_ckpt_ext.rehearsal.result import SCHEMA, Rehearsal
from mcore_ckpt_ext.rehearsal.scheduler import SimulatedScheduler
from mcore_ckpt_ext.rehearsal.simulated_ranks import BeyondRehearsalError, SimulatedRanks, arguments_to_load
from mcore_ckpt_ext.rehearsal.target import OTHER_OPTIMIZERS, TargetJob, check_changes, target_job
from mcore_ckpt_ext.settings import ACCEPT_LOST, VERIFY_ALL
from mcore_ckpt_ext.storage.checkpoint_dirs import TRACKER_FILE, iteration_folder, iteration_number
from mcore_ckpt_ext.storage.gc_pause import collector_paused
from mcore_ckpt_ext.storage.paths import as_path
from mcore_ckpt_ext.versions import Version

STOCK = "stock Megatron"
PACKAGE = "mcore_ckpt_ext"


def rehearse(
    path: Location,
    gpus: int,
    sizes: Mapping[str, int],
    options: RehearsalOptions | None = None,
    *,
    team: Communicator = ONE_PROCESS,
    **changes: object,
) -> Rehearsal:
    """Simulate a resume under another layout up to its first write, for all ranks, without Megatron.

    Args:
        path: a run folder (its newest iteration) or an iteration folder.
        gpus: number of GPUs.
        sizes: the size of each dimension, by its name in `ParallelLayout`; see `target.sizes_in`.
        options: the release that would run, and what is known of the two jobs.
        team: the processes that share the work, each with the same arguments; by default only this one.
        **changes: single options by name, instead of or in addition to `options`.

    Raises:
        UsageError: an argument has an invalid value.
        TypeError: there is no option of that name.
        CheckpointError: the checkpoint cannot be read, or a rehearsal does not support the job.
    """
    options = (options or RehearsalOptions()).with_changes(changes)
    if not options.any_change:
        check_changes(options.changes)
    check_gpus(gpus)
    version = version_number(options.megatron_version)
    plain = Rehearsal(SCHEMA, str(path), options, gpus, "not known", format_sizes({**sizes}), str(version), "")
    with reraise_as_unreadable(path), collector_paused():
        try:
            return _Rehearsing(as_path(path), sizes, team, version, plain).result()
        except BeyondRehearsalError as beyond:
            raise beyond.error from beyond


class _Rehearsing:
    """One rehearsal: it finds the checkpoint, makes the job that would resume it, and performs it."""

    def __init__(
        self, path: Path, sizes: Mapping[str, int], team: Communicator, version: Version, plain: Rehearsal
    ) -> None:
        self._path = path
        self._sizes = sizes
        self._team = team
        self._version = version
        self._plain = plain
        # Whether the job itself plans the resume; until this is decided, errors are those of all loads.
        self._plans = True

    def result(self) -> Rehearsal:
        """Return the outcome: success, or the refusal."""
        try:
            return self._rehearse()
        except RefusedError as refused:
            # Stock Megatron, and the master check after its load, have messages of their own.
            is_verbatim = refused.is_verbatim and self._plans
            return replace(self._plain, refusal=str(refused.error), is_verbatim=is_verbatim)

    def _rehearse(self) -> Rehearsal:
        load = self._find()
        options = self._plain.options
        gpus = self._plain.gpus
        communicator = SimulatedCommunicator(gpus, beyond_rehearsal=(UnsupportedCheckpointError, UsageError))
        # The first rank reads the index for all: errors of the index are its own.
        opening = replace(communicator, beyond_rehearsal=(), is_verbatim=False)
        checkpoint = opening.agree(lambda: _open(load.session), "looking at the checkpoint")[0]
        version, source = release_of(checkpoint, options.megatron_version)
        self._version = version
        self._plain = replace(self._plain, megatron_version=str(version), megatron_version_source=source)
        written = with_derived_arguments(checkpoint, with_passed(checkpoint.job.arguments(), options.arguments))
        self._plain = replace(
            self._plain,
            old_layout=str(ParallelLayout.from_arguments(written)),
            replaced=replaced_values(checkpoint.job.arguments(), options.arguments),
        )
        # The table of its parameters needs the packing of the buffers, which ranks of a job recover when they plan.
        job = replace(communicator, is_verbatim=all_read_alike(gpus, self._sizes)).agree(
            lambda: target_job(checkpoint, written, gpus, self._sizes, version, options.changes),
            "planning the resume",
        )[0]
        self._plain = replace(
            self._plain,
            new_layout=str(job.layout),
            iteration=checkpoint.job.iteration(),
            optimizer_format=checkpoint.optimizer.format(),
            flags=job.flags,
            removed_flags=job.removed_flags,
            notes=job.notes,
        )
        if job.refused is not None:
            return replace(self._plain, refusal=f"Megatron does not accept this layout: {job.refused}")
        ranks = SimulatedRanks(job.layout.world, written, job.arguments, version, self._team, full=options.full)
        self._make_ready(load, job)
        ranks.perform((COMPLETENESS, *CHECKING, *DECIDING), load)
        self._note_loader(ranks, checkpoint)
        ranks.perform(RESUMING, load)
        return self._success(load, ranks, written)

    def _find(self) -> MegatronResume:
        """Look for the checkpoint as the first rank of a job does.

        Raises:
            RefusedError: it is incomplete, and another iteration is complete.
        """
        path = self._path
        step = None if (path / TRACKER_FILE).exists() else iteration_number(path)
        run = str(path if step is None else path.parent)
        nothing = JobArguments.of({})
        load = MegatronResume(
            LoadSession(path), nothing, arguments=arguments_to_load(nothing, run, step), directory=run
        )
        ranks = SimulatedRanks(1, nothing, nothing, self._version, self._team, full=False)
        ranks.perform((*LOOKING, COMPLETENESS, *CHECKING), load)
        folder = iteration_folder(path)
        load.session = load.session.with_folder(folder)
        self._plain = replace(self._plain, path=str(folder))
        return load

    def _make_ready(self, load: MegatronResume, job: TargetJob) -> None:
        """Give a load the arguments of the job that resumes."""
        load.running = job.arguments
        load.arguments = arguments_to_load(job.arguments, str(load.directory), load.arguments.ckpt_step)
        load.options = ResumeOptions(
            VERIFY_ALL.value, ACCEPT_LOST.value, own_bounds=takes_own_bounds(job.arguments.raw, self._version)
        )
        load.scheduler = SimulatedScheduler(job.arguments)
        load.vocabulary_rows = vocabulary_rows(load.session.checkpoint)

    def _note_loader(self, ranks: SimulatedRanks, checkpoint: CheckpointView) -> None:
        """Note who loads the optimizer, if that is simulated.

        Masters that Megatron wrote shifted show in a job once stock Megatron has loaded them, and this package then
        fills the optimizer (`check_after_load.repair_shifted`).
        """
        if ranks.assessment is None:
            return
        decision = ranks.assessment.decision
        failure: Check | StockFailure | None = decision.check
        if failure is None and stock_failure(checkpoint) is SHIFTED_PARAMETERS:
            failure = SHIFTED_PARAMETERS
        is_stock = decision.is_stock and failure is None
        why = None if failure is None else f"{failure.name}; stock Megatron cannot do this: {failure.consequence}"
        notes = (*self._plain.notes, *filter(None, [ranks.assessment.rounding]))
        self._plain = replace(self._plain, loaded_by=STOCK if is_stock else PACKAGE, why=why, notes=notes)
        self._plans = not decision.is_stock

    def _success(self, load: MegatronResume, ranks: SimulatedRanks, written: JobArguments) -> Rehearsal:
        checkpoint = load.checkpoint
        figures = ranks.shares.figures
        return replace(
            self._plain,
            will_succeed=True,
            parameters=len(figures.names),
            parts=figures.parts,
            elements=figures.elements,
            weights=figures.weights,
            bytes_read=figures.bytes_read,
            optimizer_bytes_read=figures.optimizer_bytes_read,
            proven=figures.proven,
            proof=checkpoint.job.master_check.relation,
            is_full_proof=self._plain.options.full,
            order_sources=_extra_parameter_orders(checkpoint),
            data=load.data,
            differences=differences_of_jobs(written, ranks.job.arguments, self._version),
            given=tuple(self._assumptions(checkpoint, ranks.job, written)),
        )

    def _assumptions(self, checkpoint: CheckpointView, simulated: SimulatedJob, written: JobArguments) -> Iterator[str]:
        running = simulated.arguments
        if self._plain.loaded_by is None:
            yield "who loads the optimizer, stock Megatron or this package, is decided by the job: it is not simulated"
        yield "the job builds the model, and its optimizer, by the same arguments as the job that wrote the checkpoint"
        yield "not rehearsed: random states, extra states of modules, warm-up and decay, tokenizer, samples, and memory"
        for name in OTHER_OPTIMIZERS:
            if running.raw.get(name):
                yield f"the job runs without --{name.replace('_', '-')}: that optimizer is not simulated"
        if unknown := unknown_arguments(written):
            yield f"Megatron accepts the layout as far as it depends on {', '.join(unknown)}: not stored (--argument)"
        tokens = running.tokens or checkpoint.job.tokens
        if tokens is None and vocabulary_rows(checkpoint) is not None:
            yield "its tokenizer has no tokens beyond the rows of the checkpoint: how many there are is not stored"
        if rest := account_of_load(checkpoint).sentence:
            yield rest
        if simulated.frozen:
            yield f"parameters without optimizer state are frozen in the job, too: {join_some(simulated.frozen, 3)}"


def _open(session: LoadSession) -> CheckpointView:
    checkpoint = session.checkpoint
    _ = checkpoint.job.common(), checkpoint.job.arguments(), checkpoint.job.layout, checkpoint.job.iteration()
    return checkpoint


def _extra_parameter_orders(checkpoint: CheckpointView) -> tuple[str, ...]:
    """Return the sources of the parameter order; the live model's order is that of its layer spec."""
    relabeled = {LIVE_MODEL: "the order of the layer spec"}
    return tuple(relabeled.get(label, label) for label in checkpoint.optimizer.state().order_sources())
