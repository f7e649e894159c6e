"""The phases of a resume by Megatron's own loop, in order, for a job and for a rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt_ext.continuity.cyclic import ReadingLayout
from mcore_ckpt_ext.continuity.data_order import data_order, followed_history
from mcore_ckpt_ext.continuity.mathematics import sentence_of
from mcore_ckpt_ext.continuity.order_change import DataOrder
from mcore_ckpt_ext.continuity.release_changes import differences_of_releases
from mcore_ckpt_ext.errors import CheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.megatron.data_index import tokens_of
from mcore_ckpt_ext.megatron.decision_phases import ASSESSMENT, PARAMETER_ORDER, AssessedResume
from mcore_ckpt_ext.megatron.energon_states import SavedStates, add_loader_states
from mcore_ckpt_ext.megatron.learning_rate_schedule import check_schedule
from mcore_ckpt_ext.megatron.live.phases import Phase, Who
from mcore_ckpt_ext.megatron.live.planning import FILLING, PREPARING, VERIFYING
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.local_checkpoints import may_be_local
from mcore_ckpt_ext.megatron.new_tokens import keeps_initialization, new_tokens, refusal, zeros_message
from mcore_ckpt_ext.megatron.probe import LoadProbe, check_complete, probe_checkpoint
from mcore_ckpt_ext.megatron.random_seed import has_other_grid
from mcore_ckpt_ext.megatron.required_order import check_required_order
from mcore_ckpt_ext.megatron.shared_index import index_for_this_rank
from mcore_ckpt_ext.megatron.stored_progress import check_progress
from mcore_ckpt_ext.megatron.strictness import refuse_returning, returns_mismatches
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.settings import FALLBACK, FAST, LOAD
from mcore_ckpt_ext.storage.checkpoint_dirs import RELEASE
from mcore_ckpt_ext.versions import Version


@dataclass
class MegatronResume(AssessedResume):
    """One load by Megatron's own loop, as far as its phases have brought it; it may be of weights alone.

    Attributes:
        arguments: Megatron's arguments.
        load_arg: the name of the argument that holds the path to load from.
        directory: the run folder.
        takes_optimizer: True if it includes the state of an optimizer.
        is_sharded: True if the model is sharded by Megatron-FSDP or torch's FSDP.
        scheduler: the learning rate scheduler; None without one.
        version: the release of Megatron that runs; None in a rehearsal, which compares the releases itself.
        probe: the observations of the first rank.
        vocabulary_rows: the number of rows of the checkpoint's vocabulary; None if it is unknown or large enough.
        is_presented: True if this package has to present the checkpoint to Megatron.
        data: whether the data goes on in the same order; None if no job has read data before.
        data_layouts: the layouts that have read the data, if their order has to be followed.
        changes_grid: True if tensor or pipeline parallel size has changed, so that no rank finds its random state.
        release: what this release of Megatron computes otherwise; empty if it is the same.
        loader_states: the states with which the data loader of a script goes on; None if it has none.
        is_local: True if the load takes a local non-persistent checkpoint, which only stock Megatron loads.
    """

    arguments: Any = None
    load_arg: str = "load"
    directory: str | None = None
    takes_optimizer: bool = True
    is_sharded: bool = False
    scheduler: Any = None
    version: Version | None = None
    probe: LoadProbe = field(default_factory=LoadProbe, init=False)
    vocabulary_rows: int | None = field(default=None, init=False)
    is_presented: bool = field(default=False, init=False)
    data: DataOrder | None = field(default=None, init=False)
    data_layouts: Sequence[ReadingLayout] = field(default=(), init=False)
    changes_grid: bool = field(default=False, init=False)
    release: str = field(default="", init=False)
    loader_states: SavedStates | None = field(default=None, init=False)
    is_local: bool = field(default=False, init=False)

    @property
    def tokens(self) -> range:
        """The job's tokens without a row in the checkpoint."""
        return new_tokens(self.vocabulary_rows, self.arguments)


def _probe(resume: MegatronResume) -> LoadProbe:
    is_fast = LOAD.choose(resume.arguments) == FAST
    return probe_checkpoint(resume.arguments, resume.load_arg, resume.directory, shares_index=is_fast)


def _take_probe(resume: MegatronResume, performer: Any, probes: Sequence[LoadProbe | None]) -> None:
    resume.probe = probe = probes[0] or LoadProbe()
    resume.vocabulary_rows = probe.vocabulary_rows
    if probe.session is not None:
        resume.session = probe.session
    elif (index := index_for_this_rank(probe.index)) is not None:
        resume.session = LoadSession(index.folder, index)


def _check_complete(resume: MegatronResume) -> None:
    """Refuse an incomplete checkpoint if another one is complete and the user did not allow to take it."""
    if not FALLBACK.choose(resume.arguments):
        check_complete(resume.probe.health, str(resume.directory))


def _check_progress(resume: MegatronResume) -> None:
    """Refuse a checkpoint that does not say how far its run was, before Megatron looks for it."""
    schedules = resume.scheduler is not None and resume.takes_optimizer
    check_progress(resume.probe.missing, resume.arguments, str(resume.directory), has_scheduler=schedules)


def _check_strictness(resume: MegatronResume) -> None:
    """Refuse a strictness that Megatron fails with, if there is a checkpoint."""
    if resume.probe.session is not None:
        refuse_returning(resume.arguments, resume.probe.session.folder)


def check_new_tokens(resume: MegatronResume) -> None:
    """Accept tokens without a row in the checkpoint, if the user allows it or stock would say nothing.

    Raises:
        ResumeRefusedError: an optimizer is to be resumed, and the user does not allow it.
    """
    if not resume.tokens or (keeps_initialization() and not resume.is_sharded):
        return
    if resume.takes_optimizer:
        raise refusal(resume.tokens, str(resume.directory), can_be_kept=not resume.is_sharded)
    announce(zeros_message(resume.tokens))


def _goes_on_reading(resume: MegatronResume) -> bool:
    """Return True if the job is known, and reads its data on where another job has stopped."""
    return bool(resume.running.raw) and not getattr(resume.arguments, "finetune", False)


_Account = tuple[DataOrder, SavedStates | None, Sequence[ReadingLayout], bool, str]


def _account_data(resume: MegatronResume) -> _Account | None:
    """Return whether the data goes on in the same order; None if no job has read any.

    Raises:
        ModelMismatchError: it does not, or that is unknown, and the user requires it.
    """
    session = resume.probe.session
    if session is None or session.folder.name == RELEASE:
        return None
    try:
        written = session.checkpoint.job.arguments()
    except CheckpointError:
        return None  # what cannot be read is refused when the loader is decided
    order = data_order(written, resume.running, tokens=tokens_of)
    order, states = add_loader_states(order, written, resume.running, session.folder.name)
    check_required_order(order, resume.arguments, session.folder)
    version = resume.version
    computed = differences_of_releases(written, resume.running, version) if version else ()
    history = followed_history(written, resume.running)
    return order, states, history, has_other_grid(written, resume.running), sentence_of(computed) if computed else ""


def _take_data(resume: MegatronResume, performer: Any, accounts: Sequence[_Account | None]) -> None:
    if accounts[0] is not None:
        resume.data, resume.loader_states, resume.data_layouts, resume.changes_grid, resume.release = accounts[0]


def _check_tokens_of_open(resume: MegatronResume) -> None:
    resume.vocabulary_rows = vocabulary_rows(resume.checkpoint)
    check_new_tokens(resume)


def _require_schedule(resume: MegatronResume) -> None:
    """Refuse a checkpoint without the state of the learning rate scheduler.

    Raises:
        UnsupportedCheckpointError: it has none.
    """
    if resume.schedule is None:
        raise UnsupportedCheckpointError(
            "the checkpoint has no state of the learning rate scheduler",
            expected="lr_scheduler or opt_param_scheduler in its common state",
            where=str(resume.session.folder),
            hint="another training loop wrote it: resume with --no-load-optim, or call "
            "mcore_ckpt_ext.load_optimizer in a loop of your own",
        )


def _take_presentation(resume: MegatronResume, performer: Any, answers: Sequence[bool]) -> None:
    resume.is_presented = bool(answers[0])


def _take_locality(resume: MegatronResume, performer: Any, answers: Sequence[bool]) -> None:
    resume.is_local = any(answers)


LOOKING = (
    Phase("looking at what is to be loaded", Who.FIRST_RANK, _probe, collect=_take_probe),
    Phase(
        "looking at what is to be loaded",
        Who.EACH_RANK,
        lambda resume, performer: performer.observations(resume),
        collect=lambda resume, performer, observed: performer.compare_observations(resume, observed),
    ),
)
"""What is there to be loaded?"""
COMPLETENESS = Phase("looking for a complete checkpoint", Who.ALL_ALIKE, _check_complete)
"""It stands alone: a job performs the phases after it on the iteration that it takes instead of an incomplete one."""
CHECKING = (
    Phase("looking at the progress of the run", Who.ALL_ALIKE, _check_progress),
    Phase(
        "looking at the strictness",
        Who.FIRST_RANK,
        _check_strictness,
        applies=lambda resume: returns_mismatches(resume.arguments),
    ),
    Phase("comparing the vocabularies", Who.ALL_ALIKE, check_new_tokens),
    Phase(
        "looking for local checkpoints",
        Who.EACH_RANK,
        lambda resume, performer: performer.takes_local_checkpoint(resume),
        collect=_take_locality,
        applies=lambda resume: may_be_local(resume.arguments),
    ),
    Phase(
        "comparing the order of the data",
        Who.FIRST_RANK,
        _account_data,
        collect=_take_data,
        applies=_goes_on_reading,
    ),
)
"""May this be loaded at all?"""
DECIDING = (
    Phase(
        "looking at the checkpoint's format",
        Who.EACH_RANK,
        lambda resume, performer: performer.needs_presentation(resume),
        collect=_take_presentation,
    ),
    ASSESSMENT,
    *PARAMETER_ORDER,
)
"""Who loads the optimizer?"""
RESUMING = (
    *PREPARING,
    Phase(
        "comparing the schedules",
        Who.EVERY_RANK,
        _require_schedule,
        applies=lambda resume: resume.scheduler is not None,
    ),
    Phase(
        "comparing the schedules",
        Who.EVERY_RANK,
        lambda resume: check_schedule(resume.scheduler, resume.schedule, resume.session.folder),
        applies=lambda resume: resume.scheduler is not None,
        quotes=True,
    ),
    Phase("comparing the vocabularies", Who.ALL_ALIKE, _check_tokens_of_open),
    Phase("loading the weights", Who.FRAMEWORK, lambda resume, performer: performer.load_weights(resume)),
    VERIFYING,
    FILLING,
)
"""What this package does if it fills the optimizer."""
ALL_PHASES = (*LOOKING, COMPLETENESS, *CHECKING, *DECIDING, *RESUMING)
"""All phases of a resume that this package performs."""
