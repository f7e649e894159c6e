"""The phases of a resume by Megatron's own loop, in order, for a job and for a rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt_ext.continuity.cyclic import ReadingLayout
from mcore_ckpt_ext.continuity.data_order import data_order, followed_history
from mcore_ckpt_ext.continuity.order_change import DataOrder
from mcore_ckpt_ext.errors import CheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.megatron.energon_states import SavedStates, with_states
from mcore_ckpt_ext.megatron.learning_rate_schedule import check_schedule
from mcore_ckpt_ext.megatron.live.phases import Phase, Who
from mcore_ckpt_ext.megatron.live.planning import FILLING, PREPARING, VERIFYING
from mcore_ckpt_ext.megatron.live.resume import Resume
from mcore_ckpt_ext.megatron.load_decision import LoadAssessment
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.local_checkpoints import may_be_local
from mcore_ckpt_ext.megatron.new_tokens import keeps_initialization, new_tokens, refusal, zeros_message
from mcore_ckpt_ext.megatron.probe import LoadProbe, check_complete, probe_checkpoint
from mcore_ckpt_ext.megatron.random_seed import has_other_grid
from mcore_ckpt_ext.megatron.required_order import check_required_order
from mcore_ckpt_ext.megatron.shared_index import shared_with
from mcore_ckpt_ext.megatron.stored_progress import check_progress
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.settings import FALLBACK, FAST, LOAD
from mcore_ckpt_ext.storage.checkpoint_dirs import RELEASE


@dataclass
class MegatronLoad(Resume):
    """One load by Megatron's own loop, as far as its phases have brought it.

    Attributes:
        arguments: Megatron's arguments.
        load_arg: the name of the argument that holds the path to load from.
        directory: the run folder.
        takes_optimizer: True if it includes the state of an optimizer.
        is_sharded: True if the model is sharded by Megatron-FSDP or torch's FSDP.
        scheduler: the learning rate scheduler; None without one.
        probe: the observations of the first rank.
        vocabulary_rows: the number of rows of the checkpoint's vocabulary; None if it is unknown or large enough.
        is_presented: True if this package has to present the checkpoint to Megatron.
        data: whether the data goes on in the same order; None if no job has read data before.
        data_layouts: the layouts that have read the data, if their order has to be followed.
        changes_grid: True if tensor or pipeline parallel size has changed, so that no rank finds its random state.
        loader_states: the states with which the data loader of a script goes on; None if it has none.
        is_local: True if the load takes a local non-persistent checkpoint, which only stock Megatron loads.
        assessment: who loads the optimizer, and why; None before it is decided, and if there is none.
    """

    arguments: Any = None
    load_arg: str = "load"
    directory: str | None = None
    takes_optimizer: bool = True
    is_sharded: bool = False
    scheduler: Any = None
    probe: LoadProbe = field(default_factory=LoadProbe, init=False)
    vocabulary_rows: int | None = field(default=None, init=False)
    is_presented: bool = field(default=False, init=False)
    data: DataOrder | None = field(default=None, init=False)
    data_layouts: Sequence[ReadingLayout] = field(default=(), init=False)
    changes_grid: bool = field(default=False, init=False)
    loader_states: SavedStates | None = field(default=None, init=False)
    is_local: bool = field(default=False, init=False)
    assessment: LoadAssessment | None = field(default=None, init=False)

    @property
    def tokens(self) -> range:
        """The job's tokens without a row in the checkpoint."""
        return new_tokens(self.vocabulary_rows, self.arguments)


def _probe(load: MegatronLoad) -> LoadProbe:
    is_fast = LOAD.chosen(load.arguments) == FAST
    return probe_checkpoint(load.arguments, load.load_arg, load.directory, shares_index=is_fast)


def _take_probe(load: MegatronLoad, ranks: Any, probes: Sequence[LoadProbe | None]) -> None:
    load.probe = probe = probes[0] or LoadProbe()
    load.vocabulary_rows = probe.vocabulary_rows
    if probe.session is not None:
        load.session = probe.session
    elif (index := shared_with(probe.index)) is not None:
        load.session = LoadSession(index.folder, index)


def _check_complete(load: MegatronLoad) -> None:
    """Refuse an incomplete checkpoint if another one is complete and the user did not allow to take it."""
    if not FALLBACK.chosen(load.arguments):
        check_complete(load.probe.health, str(load.directory))


def _check_progress(load: MegatronLoad) -> None:
    """Refuse a checkpoint that does not say how far its run was, before Megatron looks for it."""
    schedules = load.scheduler is not None and load.takes_optimizer
    check_progress(load.probe.missing, load.arguments, str(load.directory), has_scheduler=schedules)


def check_new_tokens(load: MegatronLoad) -> None:
    """Accept tokens without a row in the checkpoint, if the user allows it or stock would say nothing.

    Raises:
        ResumeRefusedError: an optimizer is to be resumed, and the user does not allow it.
    """
    if not load.tokens or (keeps_initialization() and not load.is_sharded):
        return
    if load.takes_optimizer:
        raise refusal(load.tokens, str(load.directory), can_be_kept=not load.is_sharded)
    announce(zeros_message(load.tokens))


def _goes_on_reading(load: MegatronLoad) -> bool:
    """Return True if the job is known, and reads its data on where another job has stopped."""
    return bool(load.running.raw) and not getattr(load.arguments, "finetune", False)


_Account = tuple[DataOrder, SavedStates | None, Sequence[ReadingLayout], bool]


def _account_data(load: MegatronLoad) -> _Account | None:
    """Return whether the data goes on in the same order; None if no job has read any.

    Raises:
        ModelMismatchError: it does not, or that is unknown, and the user requires it.
    """
    session = load.probe.session
    if session is None or session.folder.name == RELEASE:
        return None
    try:
        written = session.checkpoint.job.arguments()
    except CheckpointError:
        return None  # what cannot be read is refused when the loader is decided
    order, states = with_states(data_order(written, load.running), written, load.running, session.folder.name)
    check_required_order(order, load.arguments, session.folder)
    return order, states, followed_history(written, load.running), has_other_grid(written, load.running)


def _take_data(load: MegatronLoad, ranks: Any, accounts: Sequence[_Account | None]) -> None:
    if accounts[0] is not None:
        load.data, load.loader_states, load.data_layouts, load.changes_grid = accounts[0]


def _check_tokens_of_open(load: MegatronLoad) -> None:
    load.vocabulary_rows = vocabulary_rows(load.checkpoint)
    check_new_tokens(load)


def _require_schedule(load: MegatronLoad) -> None:
    """Refuse a checkpoint without the state of the learning rate scheduler.

    Raises:
        UnsupportedCheckpointError: it has none.
    """
    if load.schedule is None:
        raise UnsupportedCheckpointError(
            "the checkpoint has no state of the learning rate scheduler",
            expected="lr_scheduler or opt_param_scheduler in its common state",
            where=str(load.session.folder),
            hint="another training loop wrote it: resume with --no-load-optim, or call "
            "mcore_ckpt_ext.load_optimizer in a loop of your own",
        )


def _take_reader(load: MegatronLoad, ranks: Any, answers: Sequence[bool]) -> None:
    load.is_presented = bool(answers[0])


def _take_locality(load: MegatronLoad, ranks: Any, answers: Sequence[bool]) -> None:
    load.is_local = any(answers)


def _take_assessment(load: MegatronLoad, ranks: Any, assessments: Sequence[LoadAssessment | None]) -> None:
    load.assessment = next((assessment for assessment in assessments if assessment is not None), None)


LOOKING = (
    Phase("looking at what is to be loaded", Who.FIRST_RANK, _probe, collect=_take_probe),
    Phase(
        "looking at what is to be loaded",
        Who.EACH_RANK,
        lambda load, ranks: ranks.observed(load),
        collect=lambda load, ranks, observed: ranks.compare_observed(load, observed),
    ),
)
"""What is there to be loaded?"""
CHECKING = (
    Phase("looking for a complete checkpoint", Who.ALL_ALIKE, _check_complete),
    Phase("looking at the progress of the run", Who.ALL_ALIKE, _check_progress),
    Phase("comparing the vocabularies", Who.ALL_ALIKE, check_new_tokens),
    Phase(
        "looking for local checkpoints",
        Who.EACH_RANK,
        lambda load, ranks: ranks.takes_local_checkpoint(load),
        collect=_take_locality,
        applies=lambda load: may_be_local(load.arguments),
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
        lambda load, ranks: ranks.needs_presentation(load),
        collect=_take_reader,
    ),
    Phase(
        "looking at the checkpoint",
        Who.EACH_RANK,
        lambda load, ranks: ranks.assess(load),
        collect=_take_assessment,
    ),
)
"""Who loads the optimizer?"""
RESUMING = (
    *PREPARING,
    Phase(
        "comparing the schedules",
        Who.EVERY_RANK,
        _require_schedule,
        applies=lambda load: load.scheduler is not None,
    ),
    Phase(
        "comparing the schedules",
        Who.EVERY_RANK,
        lambda load: check_schedule(load.scheduler, load.schedule, load.session.folder),
        applies=lambda load: load.scheduler is not None,
        quotes=True,
    ),
    Phase("comparing the vocabularies", Who.ALL_ALIKE, _check_tokens_of_open),
    Phase("loading the weights", Who.FRAMEWORK, lambda load, ranks: ranks.load_weights(load)),
    VERIFYING,
    FILLING,
)
"""What this package does if it fills the optimizer."""
MEGATRON = (*LOOKING, *CHECKING, *DECIDING, *RESUMING)
"""All phases of a resume that this package performs."""
