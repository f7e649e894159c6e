"""Assesses a checkpoint before a resume: does Megatron itself load its optimizer correctly?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt_ext.collectives import agree, is_first_rank
from mcore_ckpt_ext.errors import escape
from mcore_ckpt_ext.formats.legacy.reader import NAME as LEGACY
from mcore_ckpt_ext.formats.torch_dist.reader import NAME as TORCH_DIST
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.decision_facts import RunningJob, decision_on, facts_of
from mcore_ckpt_ext.megatron.live.compatibility import another_kind_of_optimizer, check_optimizer_was_saved
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain, is_another_kind, kind_named
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.policy import LoadDecision
from mcore_ckpt_ext.megatron.random_states import grid_may_differ, random_states_are_lacking, random_states_are_too_few
from mcore_ckpt_ext.megatron.run_folder import detects_format
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.optimizers.kept_precision import rounding_of
from mcore_ckpt_ext.optimizers.table import may_be_shifted
from mcore_ckpt_ext.patching.log import is_logging_rank, own_logger
from mcore_ckpt_ext.patching.overrides import Scope
from mcore_ckpt_ext.settings import EXPLAIN
from mcore_ckpt_ext.storage.checkpoint_dirs import RELEASE

_PHASE = "looking at the checkpoint"


@dataclass(frozen=True)
class LoadAssessment:
    """The assessment of a checkpoint before it is loaded.

    Attributes:
        folder: the iteration folder.
        decision: which of stock Megatron and this package loads the optimizer, and why.
        is_presented: `sources.legacy_state_dict` has to present the weights to Megatron.
        rounding: see `rounding_of`.
    """

    folder: Path
    decision: LoadDecision
    is_presented: bool = False
    rounding: str = ""

    @property
    def may_be_shifted(self) -> bool:
        """True if masters may be shifted (see `optimizers.workarounds.fully_reshardable_padding`)."""
        return may_be_shifted(self.decision.optimizer_format)


def assess(
    session: LoadSession,
    job: RunningJob,
    common: Mapping[str, Any] | None,
    lacks_states: Callable[[JobArguments], bool] = lambda written: False,
) -> LoadAssessment | None:
    """Assess a checkpoint for a job of Megatron's own loop, live or simulated.

    Args:
        session: the folder to load.
        job: the job.
        common: see `facts_of`.
        lacks_states: returns True if the checkpoint lacks random states that the job requests, given the arguments of
            the job that wrote it.

    Returns:
        The assessment; None if there is no optimizer state that this package could fill.

    Raises:
        CheckpointError: the job cannot resume the checkpoint, whatever its optimizer is.
    """
    facts = facts_of(session, job, common)
    decision = decision_on(facts)
    if decision is None:
        return None
    lacking = random_states_are_too_few(facts.written, facts.running) or lacks_states(facts.written)
    return LoadAssessment(
        session.folder,
        replace(decision, omits_random_states=lacking),
        is_presented=common is None,
        rounding=rounding_of(facts.written, facts.running, is_scaled_anew=facts.is_moved),
    )


def explain(decision: LoadDecision, folder: Path) -> None:
    """Print a decision if MCORE_CKPT_EXT_EXPLAIN is set."""
    if EXPLAIN.value and is_logging_rank():
        own_logger().info("%s: %s", escape(str(folder)), decision)


def assess_live(
    scope: Scope,
    call: Mapping[str, Any],
    session: LoadSession,
    directory: str | None,
    *,
    is_presented: bool,
    has_new_tokens: bool,
) -> LoadAssessment | None:
    """Assess the checkpoint that a load of a running job takes, on this rank.

    It contains a collective of Megatron unless the checkpoint is presented: see `_call_megatron`.

    Args:
        scope: the globals of Megatron's checkpointing module.
        call: the arguments of `load_checkpoint`.
        session: the folder to load.
        directory: the run folder.
        is_presented: True if `sources.legacy_state_dict` presents the checkpoint to Megatron.
        has_new_tokens: True if the job has tokens without a row in the checkpoint.

    Returns:
        The assessment; None if there is no optimizer state that this package could fill.
    """
    arguments = scope["get_args"]()
    optimizer = call["optimizer"]
    children = len(getattr(optimizer, "chained_optimizers", [None]))
    job = RunningJob(Chain.of(optimizer), children, arguments, megatron_version(), has_new_tokens)
    if is_presented:
        return None if session.folder.name == RELEASE else assess(session, job, None)
    if arguments.ckpt_format == LEGACY and not detects_format(arguments):
        return None
    common, name, release, kind = _common_state(scope, call, directory, session)
    if common is None or release or getattr(kind, "name", None) != "GLOBAL":
        return None
    session = session.with_folder(Path(name))
    return assess(session, job, common, lambda written: lacks_random_states(session, arguments, written))


def _common_state(scope: Scope, call: Mapping[str, Any], directory: str | None, session: LoadSession) -> Any:
    """Return the result of `_call_megatron`.

    Raises:
        CheckpointError: Megatron cannot read the common state. This package reads it once more, because its error
            names the file and has a hint.
    """
    try:
        return _call_megatron(scope, call, directory)
    except (Exception, CheckpointException):
        if directory:
            _ = session.checkpoint.job.common()
        raise


def lacks_random_states(session: LoadSession, arguments: Any, written: JobArguments | None = None) -> bool:
    """Return True if a torch_dist checkpoint has another grid of random states; only rank 0 reads it."""
    if not grid_may_differ(arguments) or not is_first_rank():
        return False
    checkpoint = session.checkpoint
    if checkpoint.files.index() is None:
        return False
    settings = (written or checkpoint.job.arguments()).raw
    return random_states_are_lacking(checkpoint.states.random_grid(), arguments, megatron_version(), settings)


def refuse_another_kind(scope: Scope, call: Mapping[str, Any], directory: str | None) -> None:
    """Refuse a state of another kind of optimizer, which this package does not fill. Collective.

    Megatron reports all other errors.

    Raises:
        ResumeRefusedError: on every rank, if the checkpoint names another kind of optimizer than the running job.
    """
    arguments = scope["get_args"]()

    def compare() -> None:
        try:
            common, name, release, _ = _call_megatron(scope, call, directory)
        except (Exception, CheckpointException):  # noqa: BLE001 - stock Megatron meets it again and reports it
            return
        if common is None or release or "args" not in common:
            return
        written = JobArguments.of(vars(common["args"]))
        check_optimizer_was_saved(written, str(name))
        running_kind = kind_named(vars(arguments))
        if is_another_kind(written, running_kind):
            stored_kind = kind_named(written.raw)
            raise another_kind_of_optimizer(f"--optimizer {stored_kind}", f"--optimizer {running_kind}", str(name))

    if arguments.ckpt_format == TORCH_DIST:
        agree(_PHASE, compare)


def _call_megatron(scope: Scope, call: Mapping[str, Any], directory: str | None) -> Any:
    """Return the common state, the folder's name, True for a release, and the kind of checkpoint.

    It contains one collective (`read_metadata`), which precedes everything that can fail on single ranks, provided
    that all ranks see a tracker (`check_all_see`).
    """
    arguments = scope["get_args"]()
    context = {key: call[key] for key in ("checkpointing_context",) if key in call}
    return scope["_load_base_checkpoint"](directory, arguments, rank0=True, **context)
