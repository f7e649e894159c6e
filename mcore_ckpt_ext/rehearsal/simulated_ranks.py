"""The simulated ranks of a job, which perform the phases of a resume as the ranks of a job do."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mcore_ckpt_ext.communicator import Communicator
from mcore_ckpt_ext.errors import CheckpointError, ContentError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import LOADS_ZARR
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.megatron.decision_facts import RunningJob
from mcore_ckpt_ext.megatron.live.job import RankSummary
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import kind_named
from mcore_ckpt_ext.megatron.live.phases import Phase, Who
from mcore_ckpt_ext.megatron.live.planning import PLAN
from mcore_ckpt_ext.megatron.live.resume import Resume
from mcore_ckpt_ext.megatron.load_assessment import LoadAssessment, assess
from mcore_ckpt_ext.megatron.load_phases import MegatronResume
from mcore_ckpt_ext.megatron.local_checkpoints import LOCAL
from mcore_ckpt_ext.megatron.presentation import may_need_presentation
from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER, WEIGHT
from mcore_ckpt_ext.planning.plan import named_tensor
from mcore_ckpt_ext.rehearsal.agreement import RefusedError, SimulatedCommunicator, all_read_alike, run_by_rank
from mcore_ckpt_ext.rehearsal.data_parallel import DataParallelRanks
from mcore_ckpt_ext.rehearsal.groups import simulated_groups
from mcore_ckpt_ext.rehearsal.optimizers import simulated_chain
from mcore_ckpt_ext.rehearsal.ranks import SimulatedJob, dtype_of
from mcore_ckpt_ext.rehearsal.shares import Shares
from mcore_ckpt_ext.rehearsal.target import OTHER_OPTIMIZERS
from mcore_ckpt_ext.versions import Version


class BeyondRehearsalError(Exception):
    """Ends a rehearsal of something that it cannot simulate.

    Attributes:
        error: the error to raise to the user.
    """

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(str(error))
        self.error = error


class SimulatedRanks:
    """All ranks of a simulated job.

    Attributes:
        shares: what they would read; set by the phase that plans.
        job: the simulated job with the checkpoint's own model; set by the same phase.
        assessment: who loads the optimizer, and why; None if it is not simulated.
    """

    shares: Shares
    job: SimulatedJob

    def __init__(
        self,
        size: int,
        written: JobArguments,
        running: JobArguments,
        version: Version,
        team: Communicator,
        *,
        full: bool,
    ) -> None:
        """Simulate ranks.

        Args:
            size: their number.
            written: the arguments of the job that wrote the checkpoint.
            running: the arguments of the simulated job.
            version: the release of Megatron.
            team: the processes that share the work.
            full: whether to compare all masters with their weights, not only samples.
        """
        self._size = size
        self._written = written
        self._running = running
        self._version = version
        self._team = team
        self._full = full
        self._phase = ""
        self.assessment: LoadAssessment | None = None

    def perform(self, phases: Sequence[Phase], load: Resume) -> None:
        """Perform phases up to the first that writes.

        Raises:
            RefusedError: some rank would refuse.
            BeyondRehearsalError: a phase cannot be simulated.
        """
        for phase in phases:
            if phase.writes:
                return
            if phase.applies(load):
                self._perform(phase, load)

    def _perform(self, phase: Phase, load: Resume) -> None:
        self._phase = phase.name
        if phase.who is Who.EACH_SHARE:
            self._share(phase, load)
            return
        takes_ranks = phase.who in (Who.EACH_RANK, Who.FRAMEWORK)
        ranks = 1 if phase.who is Who.FIRST_RANK else self._size
        communicator = SimulatedCommunicator(ranks, is_verbatim=not phase.quotes)
        work = partial(phase.work, load, *([self] if takes_ranks else []))
        result = communicator.agree(work, phase.name, phase.consequence)[0]
        if phase.collect is not None:
            phase.collect(load, self, [result])

    def _share(self, phase: Phase, load: Resume) -> None:
        """Do the work of all ranks at once; if it fails, find out which ranks would refuse."""
        try:
            phase.work(load, 0, 1)
        except ContentError as error:
            run_by_rank(phase.name, self._size, lambda rank: phase.work(load, rank, self._size))
            raise RefusedError(error, is_verbatim=False) from error

    # The work of each rank in the phases.

    def observations(self, load: MegatronResume) -> None:
        """Do nothing: simulated ranks see the same folder and have the same settings."""

    def compare_observations(self, load: MegatronResume, observed: Sequence[None]) -> None:
        """Do nothing: see `observed`."""

    def needs_presentation(self, load: MegatronResume) -> bool:
        """Return True if this package has to present the checkpoint to Megatron."""
        reads_zarr = LOADS_ZARR.is_of(self._version)
        return may_need_presentation(load.session, load.arguments, self._version_pair, reads_zarr=lambda: reads_zarr)

    def assess(self, load: MegatronResume) -> LoadAssessment | None:
        """Assess the checkpoint for simulated optimizers.

        Raises:
            CheckpointError: the job cannot resume the checkpoint, whatever its optimizer is.
            BeyondRehearsalError: the checkpoint has no optimizer state.
        """
        checkpoint = load.session.checkpoint
        running = self._running
        # Live optimizers have groups of their own; a job reads those of the checkpoint when it plans.
        groups = SimulatedCommunicator(self._size).agree(lambda: self.groups(checkpoint), PLAN.name)[0]
        has_state = checkpoint.optimizer.format() is not None
        dtypes = {named_tensor(checkpoint, WEIGHT, name).dtype for name in checkpoint.names(WEIGHT)}
        chain = simulated_chain(
            running,
            groups,
            {dtype_of(dtype, running) for dtype in dtypes},
            has_remainders=has_state and PARAM_REMAINDER in checkpoint.optimizer.state().kinds,
        )
        job = RunningJob(chain, len(groups), load.arguments, self._version_pair, bool(load.tokens))
        assessment = assess(load.session, job, None if load.is_presented else checkpoint.job.common())
        if not has_state:
            raise BeyondRehearsalError(
                UnsupportedCheckpointError(
                    "there is nothing to rehearse: the checkpoint has no optimizer state that this version reads",
                    where=str(load.session.folder),
                    hint="start the job: stock Megatron loads weights under any layout",
                )
            )
        # Other optimizers than Adam are not simulated, nor are those of FSDP.
        is_simulated = kind_named(running.raw) in (None, "adam") and not any(map(running.raw.get, OTHER_OPTIMIZERS))
        self.assessment = assessment if is_simulated else None
        return assessment

    def packs_otherwise(self, recorded: Mapping[tuple[int, int], str]) -> bool:
        """Return False: the simulated model is the checkpoint's own, in its order."""
        return False

    def read_model(self, resume: Resume) -> RankSummary:
        """Return the summary of the model, which is the checkpoint's own."""
        return self._simulated_job(resume.session.checkpoint).view

    def rename(self, resume: Resume) -> None:
        """Do nothing: the model has the names of the checkpoint."""

    def weight_specs(self) -> Mapping[str, Any]:
        """Refuse: nothing describes the weights of a job.

        Raises:
            BeyondRehearsalError: always.
        """
        raise BeyondRehearsalError(
            UnsupportedCheckpointError(
                "an optimizer without weights cannot be rehearsed", hint="start the job, which has the weights"
            )
        )

    def plan(self, resume: Resume) -> None:
        """Plan the reads of all ranks.

        Raises:
            RefusedError: some rank would refuse.
        """
        self.job = job = self._simulated_job(resume.checkpoint)
        is_verbatim = all_read_alike(self._size, job.layout.model_sizes())
        SimulatedCommunicator(self._size, is_verbatim=is_verbatim).agree(lambda: job.trained, self._phase)
        groups = SimulatedCommunicator(self._size).agree(lambda: self.groups(resume.checkpoint), self._phase)[0]
        ranks = DataParallelRanks(job, resume.checkpoint, self._version)
        self.shares = Shares(job, resume, groups, ranks, self._team)
        self.shares.plan(self._phase)

    def load_weights(self, resume: Resume) -> None:
        """Find all weights that some rank loads; the framework's own load is not simulated.

        Raises:
            RefusedError: a weight is missing.
        """
        self.shares.find_weights()

    def verify_masters(self, resume: Resume) -> None:
        """Compare masters with their weights.

        Raises:
            RefusedError: some rank would refuse.
        """
        self.shares.prove(self._phase, full=self._full)

    def groups(self, checkpoint: CheckpointView) -> list[list[dict[str, Any]]]:
        """Return the parameter groups of each optimizer of the job."""
        has_experts = ParallelLayout.from_arguments(self._running).separates_experts
        shapes = {name: named_tensor(checkpoint, WEIGHT, name).shape for name in checkpoint.names(WEIGHT)}
        return simulated_groups(
            checkpoint.optimizer.param_groups(), self._written, self._running, shapes, has_expert_optimizer=has_experts
        )

    @property
    def _version_pair(self) -> tuple[int, int]:
        return self._version.major, self._version.minor

    def _simulated_job(self, checkpoint: CheckpointView) -> SimulatedJob:
        try:
            return SimulatedJob(checkpoint, self._running, self._version)
        except UnsupportedCheckpointError as error:
            raise BeyondRehearsalError(error) from error


def arguments_to_load(running: JobArguments, run: str, step: int | None) -> Namespace:
    """Return Megatron's arguments of a job that loads a run, or one step of it.

    Local non-persistent checkpoints lie on the nodes of a job, and are not simulated.
    """
    kind = running.raw.get("non_persistent_ckpt_type")
    overrides = {"load": run, "ckpt_step": step, "no_load_rng": True}
    return Namespace(**{**running.raw, **overrides, "non_persistent_ckpt_type": None if kind == LOCAL else kind})
