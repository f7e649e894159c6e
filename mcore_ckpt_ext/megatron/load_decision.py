"""The first look at a checkpoint that is to be resumed: whether Megatron itself loads its optimizer, correctly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt_ext.collectives import agreed, attempt, is_first_rank
from mcore_ckpt_ext.errors import escape
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.legacy.reader import NAME as LEGACY
from mcore_ckpt_ext.formats.sidecar_file import find_sidecar
from mcore_ckpt_ext.formats.torch_dist.reader import NAME as TORCH_DIST
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.sidecar import orders_of
from mcore_ckpt_ext.megatron.decision_facts import decision_on, facts_of_common, facts_of_fed
from mcore_ckpt_ext.megatron.live.compatibility import another_kind_of_optimizer, check_optimizer_was_saved
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain, is_another_kind, kind_named
from mcore_ckpt_ext.megatron.live.sidecar_writer import recorded_groups
from mcore_ckpt_ext.megatron.load_facts import LoadFacts
from mcore_ckpt_ext.megatron.policy import LoadDecision, decide
from mcore_ckpt_ext.megatron.random_states import are_lacking, are_too_few, may_differ
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.megatron.sources.legacy_state_dict import folder_to_feed
from mcore_ckpt_ext.optimizers.model_space_formats import FULLY_RESHARDABLE
from mcore_ckpt_ext.optimizers.table import encodings_named, shows_names
from mcore_ckpt_ext.patching.log import is_logging_rank, own_logger
from mcore_ckpt_ext.settings import EXPLAIN
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_name

_PHASE = "looking at the checkpoint"


@dataclass(frozen=True)
class LoadAssessment:
    """The assessment of a checkpoint before it is loaded.

    Attributes:
        folder: the iteration folder.
        decision: whether Megatron itself loads the optimizer, correctly.
        is_fed: the weights must be fed to it (see `legacy_feed`).
    """

    folder: Path
    decision: LoadDecision
    is_fed: bool = False

    @property
    def lacks_random_states(self) -> bool:
        """Whether stock Megatron requests random states that are not stored."""
        return self.decision.omits_random_states

    @property
    def stock_loads(self) -> bool:
        """Whether Megatron itself loads the optimizer."""
        return self.decision.is_stock

    @property
    def is_moved(self) -> bool:
        """Whether the parallel layout is another one."""
        return self.decision.is_moved

    @property
    def may_be_shifted(self) -> bool:
        """Whether Megatron may have written it shifted (see `optimizers.workarounds.fully_reshardable_padding`)."""
        return any(one.name == FULLY_RESHARDABLE for one in encodings_named(self.decision.optimizer_format))


def assess_load(
    scope: Mapping[str, Any], call: Mapping[str, Any], directory: str | None, *, has_new_tokens: bool
) -> LoadAssessment | None:
    """Look at what a load would take; collective.

    Args:
        scope: the globals of Megatron's checkpointing module.
        call: the arguments of `load_checkpoint`.
        directory: the run folder.
        has_new_tokens: the job has tokens that the checkpoint holds no row for.

    Returns:
        None where there is no optimizer state for this package to consider.

    Raises:
        ResumeRefusedError: on every rank, where some rank cannot.
    """
    assessment = _assess_on_all_ranks(scope, call, directory, has_new_tokens)
    if assessment is not None and assessment.stock_loads and not assessment.is_fed:
        chunks = functools.partial(scope["unwrap_model"], call["ddp_model"])
        assessment = replace(
            assessment, decision=with_order_compared(assessment.decision, assessment.folder, chunks, call["optimizer"])
        )
    if assessment is not None:
        explain(assessment.decision, assessment.folder)
    return assessment


def with_order_compared(
    decision: LoadDecision, folder: Path, chunks: Callable[[], Sequence[Any]], optimizer: Any
) -> LoadDecision:
    """A decision for stock, reconsidered where arrays do not show names and the sidecar shows others; collective."""
    if not decision.is_stock or shows_names(decision.optimizer_format):
        return decision
    facts = LoadFacts(
        decision.loop, megatron_version(), decision.optimizer_format, decision.is_moved,
        is_packed_otherwise=packs_otherwise(folder, chunks, optimizer),
    )  # fmt: skip
    return replace(decide(facts), omits_random_states=decision.omits_random_states)


def explain(decision: LoadDecision, folder: Path) -> None:
    """Print a decision where MCORE_CKPT_EXT_EXPLAIN requests it, each time that it is made."""
    if EXPLAIN.value and is_logging_rank():
        own_logger().info("%s: %s", escape(str(folder)), decision)


def _assess_on_all_ranks(
    scope: Mapping[str, Any], call: Mapping[str, Any], directory: str | None, has_new_tokens: bool
) -> LoadAssessment | None:
    """The first rank's look; collective."""
    arguments = scope["get_args"]()
    folder = agreed(_PHASE, lambda: folder_to_feed(directory, arguments))[0]
    if folder is not None:
        return agreed(_PHASE, lambda: _look_at_what_is_fed(folder, call, arguments, has_new_tokens))[0]
    if arguments.ckpt_format == LEGACY and not getattr(arguments, "auto_detect_ckpt_format", False):
        return None
    assessments = agreed(_PHASE, lambda: _assess(scope, call, directory, has_new_tokens))
    return next((assessment for assessment in assessments if assessment is not None), None)


def packs_otherwise(folder: Path, chunks: Callable[[], Sequence[Any]], optimizer: Any) -> bool:
    """Whether parameters have other places in the buffers than the sidecar says, if there is one; collective.

    To be asked where arrays do not show their parameters' names.
    Other parameters may be trained, or their modules registered in another order. Stock takes each other's state for
    that of parameters of one size, under an unchanged layout, and beside remainders no proof would show it: every pair
    of a weight and a remainder is some master's.
    """

    def recorded() -> Mapping[tuple[int, int], str] | None:
        # What it records of the layout need not be compared: its order with the live one is.
        sidecar = find_sidecar(folder).sidecar if is_first_rank() else None
        return None if sidecar is None else sidecar.order()

    def differs() -> bool:
        own: dict[tuple[int, int], str] = {}
        # What stock loads need not be of a kind that is known here.
        attempt(lambda: own.update(orders_of(recorded_groups(chunks(), optimizer))))
        return any(known.get(group, order) != order for group, order in own.items())

    known = agreed(_PHASE, recorded)[0] or {}
    return bool(known) and any(agreed(_PHASE, differs))


def _look_at_what_is_fed(
    folder: Path, call: Mapping[str, Any], arguments: Any, has_new_tokens: bool
) -> LoadAssessment | None:
    if folder.name == "release":
        return None
    chain, version = Chain.of(call["optimizer"]), megatron_version()
    facts = facts_of_fed(folder, chain, arguments, version, has_new_tokens=has_new_tokens)
    decision = replace(decide(facts), omits_random_states=are_too_few(facts.written, facts.running))
    return LoadAssessment(folder, decision, is_fed=True)


def _assess(
    scope: Mapping[str, Any], call: Mapping[str, Any], directory: str | None, has_new_tokens: bool
) -> LoadAssessment | None:
    """Look at the common state with Megatron's own reader, which knows of steps, trackers and non-persistent saves."""
    arguments = scope["get_args"]()
    common, name, release, kind = _common_state(scope, call, directory)
    if common is None or release or getattr(kind, "name", None) != "GLOBAL":
        return None
    folder, optimizer, version = Path(name), call["optimizer"], megatron_version()
    chain, children = Chain.of(optimizer), len(getattr(optimizer, "chained_optimizers", [None]))
    facts = facts_of_common(folder, common, chain, children, arguments, version, has_new_tokens=has_new_tokens)
    decision = decision_on(facts)
    if decision is None:
        return None
    lacking = are_too_few(facts.written, facts.running) or lacks_random_states(folder, arguments, facts.written)
    return LoadAssessment(folder, replace(decision, omits_random_states=lacking))


def _common_state(scope: Mapping[str, Any], call: Mapping[str, Any], directory: str | None) -> Any:
    """What `_by_megatron` returns.

    Raises:
        CheckpointError: Megatron cannot read it; Megatron and torch report what they missed, this package's own reader
            names the file, and has a hint.
    """
    try:
        return _by_megatron(scope, call, directory)
    except (Exception, CheckpointException):
        if directory:
            step = getattr(scope["get_args"](), "ckpt_step", None)
            _ = open_checkpoint(Path(directory) / iteration_name(step) if step else Path(directory)).common
        raise


def lacks_random_states(folder: Path, arguments: Any, written: JobArguments | None = None) -> bool:
    """Whether a torch_dist checkpoint was saved with another grid of random states; seen by the first rank alone."""
    if not may_differ(arguments) or not is_first_rank():
        return False
    checkpoint = open_checkpoint(folder)
    if checkpoint.format_reader.index is None:
        return False
    stated = (written or checkpoint.arguments).raw
    return are_lacking(checkpoint.random_state_grid(), arguments, megatron_version(), stated)


def refuse_another_kind(scope: Mapping[str, Any], call: Mapping[str, Any], directory: str | None) -> None:
    """Refuse what a live optimizer that is not filled here cannot use; all else that is wrong is Megatron's to tell.

    Collective.

    Raises:
        ResumeRefusedError: on every rank, where the checkpoint names another kind of optimizer than the running job.
    """
    arguments = scope["get_args"]()
    if arguments.ckpt_format == TORCH_DIST:
        agreed(_PHASE, lambda: _refuse_another_kind(scope, call, directory))


def _refuse_another_kind(scope: Mapping[str, Any], call: Mapping[str, Any], directory: str | None) -> None:
    arguments = scope["get_args"]()
    try:
        common, name, release, _ = _by_megatron(scope, call, directory)
    except (Exception, CheckpointException):  # noqa: BLE001 - stock meets it, too, and tells it
        return
    if common is None or release or "args" not in common:
        return
    written = JobArguments.of(vars(common["args"]))
    check_optimizer_was_saved(written, str(name))
    if is_another_kind(written, kind_named(vars(arguments))):
        found, expected = (f"--optimizer {kind_named(one)}" for one in (written.raw, vars(arguments)))
        raise another_kind_of_optimizer(found, expected, str(name))


def _by_megatron(scope: Mapping[str, Any], call: Mapping[str, Any], directory: str | None) -> Any:
    """The common state, the folder's name, whether it is a release, and its kind.

    The ranks meet in it, once (`read_metadata`): before anything that can fail on some of them alone, if all see a
    tracker (`check_all_see`).
    """
    arguments = scope["get_args"]()
    context = {key: call[key] for key in ("checkpointing_context",) if key in call}
    return scope["_load_base_checkpoint"](directory, arguments, rank0=True, **context)
