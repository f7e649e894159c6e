"""Assesses a checkpoint before a resume: does Megatron itself load its optimizer correctly?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
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
from mcore_ckpt_ext.megatron.decision_facts import decision_on, facts_of_common, facts_of_presented
from mcore_ckpt_ext.megatron.live.compatibility import another_kind_of_optimizer, check_optimizer_was_saved
from mcore_ckpt_ext.megatron.live.model import Chunks
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain, is_another_kind, kind_named
from mcore_ckpt_ext.megatron.live.sidecar_writer import recorded_groups
from mcore_ckpt_ext.megatron.load_facts import LoadFacts
from mcore_ckpt_ext.megatron.policy import LoadDecision, decide
from mcore_ckpt_ext.megatron.random_states import are_lacking, are_too_few, may_differ
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.megatron.sources.legacy_state_dict import folder_to_present
from mcore_ckpt_ext.optimizers.model_space_formats import FULLY_RESHARDABLE
from mcore_ckpt_ext.optimizers.table import encodings_named, shows_names
from mcore_ckpt_ext.patching.log import is_logging_rank, own_logger
from mcore_ckpt_ext.patching.overrides import Scope
from mcore_ckpt_ext.settings import EXPLAIN
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_name

_PHASE = "looking at the checkpoint"


@dataclass(frozen=True)
class LoadAssessment:
    """The assessment of a checkpoint before it is loaded.

    Attributes:
        folder: the iteration folder.
        decision: which of stock Megatron and this package loads the optimizer, and why.
        is_presented: `sources.legacy_state_dict` has to present the weights to Megatron.
    """

    folder: Path
    decision: LoadDecision
    is_presented: bool = False

    @property
    def may_be_shifted(self) -> bool:
        """True if masters may be shifted (see `optimizers.workarounds.fully_reshardable_padding`)."""
        return any(one.name == FULLY_RESHARDABLE for one in encodings_named(self.decision.optimizer_format))


def assess_load(
    scope: Scope, call: Mapping[str, Any], directory: str | None, *, has_new_tokens: bool
) -> LoadAssessment | None:
    """Assess the checkpoint that a load takes. Collective.

    Args:
        scope: the globals of Megatron's checkpointing module.
        call: the arguments of `load_checkpoint`.
        directory: the run folder.
        has_new_tokens: True if the job has tokens without a row in the checkpoint.

    Returns:
        The assessment; None if there is no optimizer state that this package could fill.

    Raises:
        ResumeRefusedError: on every rank, if the assessment fails on some rank.
    """
    assessment = _assess_on_all_ranks(scope, call, directory, has_new_tokens)
    if assessment is not None and assessment.decision.is_stock and not assessment.is_presented:
        chunks = functools.partial(scope["unwrap_model"], call["ddp_model"])
        assessment = replace(
            assessment, decision=with_order_compared(assessment.decision, assessment.folder, chunks, call["optimizer"])
        )
    if assessment is not None:
        explain(assessment.decision, assessment.folder)
    return assessment


def with_order_compared(
    decision: LoadDecision, folder: Path, chunks: Callable[[], Chunks], optimizer: Any
) -> LoadDecision:
    """Decide again if arrays have no parameter names and the sidecar has another order. Collective."""
    if not decision.is_stock or shows_names(decision.optimizer_format):
        return decision
    facts = LoadFacts(
        decision.loop, megatron_version(), decision.optimizer_format, decision.is_moved,
        is_packed_otherwise=packs_otherwise(folder, chunks, optimizer),
    )  # fmt: skip
    return replace(decide(facts), omits_random_states=decision.omits_random_states)


def explain(decision: LoadDecision, folder: Path) -> None:
    """Print a decision if MCORE_CKPT_EXT_EXPLAIN is set."""
    if EXPLAIN.value and is_logging_rank():
        own_logger().info("%s: %s", escape(str(folder)), decision)


def _assess_on_all_ranks(
    scope: Scope, call: Mapping[str, Any], directory: str | None, has_new_tokens: bool
) -> LoadAssessment | None:
    """Return the assessment of rank 0. Collective."""
    arguments = scope["get_args"]()
    folder = agreed(_PHASE, lambda: folder_to_present(directory, arguments))[0]
    if folder is not None:
        return agreed(_PHASE, lambda: _assess_presented(folder, call, arguments, has_new_tokens))[0]
    if arguments.ckpt_format == LEGACY and not getattr(arguments, "auto_detect_ckpt_format", False):
        return None
    assessments = agreed(_PHASE, lambda: _assess(scope, call, directory, has_new_tokens))
    return next((assessment for assessment in assessments if assessment is not None), None)


def packs_otherwise(folder: Path, chunks: Callable[[], Chunks], optimizer: Any) -> bool:
    """Return True if the sidecar, if any, gives parameters other places in the buffers. Collective.

    It matters only if arrays do not have the names of parameters. Other parameters may be trained, or their modules
    registered in another order. Under an unchanged layout stock Megatron then mixes up the state of parameters of equal
    size. With remainders no comparison would reveal it: every pair of a weight and a remainder forms a valid master.
    """

    def recorded() -> Mapping[tuple[int, int], str] | None:
        # The sidecar's layout is not compared: its order is compared with the live one.
        sidecar = find_sidecar(folder).sidecar if is_first_rank() else None
        return None if sidecar is None else sidecar.order()

    def differs() -> bool:
        own: dict[tuple[int, int], str] = {}
        # Stock Megatron may load kinds of optimizers that this package does not support.
        attempt(lambda: own.update(orders_of(recorded_groups(chunks(), optimizer))))
        return any(known.get(group, order) != order for group, order in own.items())

    known = agreed(_PHASE, recorded)[0] or {}
    return bool(known) and any(agreed(_PHASE, differs))


def _assess_presented(
    folder: Path, call: Mapping[str, Any], arguments: Any, has_new_tokens: bool
) -> LoadAssessment | None:
    if folder.name == "release":
        return None
    chain, version = Chain.of(call["optimizer"]), megatron_version()
    facts = facts_of_presented(folder, chain, arguments, version, has_new_tokens=has_new_tokens)
    decision = replace(decide(facts), omits_random_states=are_too_few(facts.written, facts.running))
    return LoadAssessment(folder, decision, is_presented=True)


def _assess(
    scope: Scope, call: Mapping[str, Any], directory: str | None, has_new_tokens: bool
) -> LoadAssessment | None:
    """Assess the common state that Megatron's own reader returns.

    It resolves steps, trackers and non-persistent saves.
    """
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


def _common_state(scope: Scope, call: Mapping[str, Any], directory: str | None) -> Any:
    """Return the result of `_by_megatron`.

    Raises:
        CheckpointError: Megatron cannot read the common state. This package reads it once more, because its error
            names the file and has a hint.
    """
    try:
        return _by_megatron(scope, call, directory)
    except (Exception, CheckpointException):
        if directory:
            step = getattr(scope["get_args"](), "ckpt_step", None)
            _ = open_checkpoint(Path(directory) / iteration_name(step) if step else Path(directory)).common
        raise


def lacks_random_states(folder: Path, arguments: Any, written: JobArguments | None = None) -> bool:
    """Return True if a torch_dist checkpoint has another grid of random states; only rank 0 reads it."""
    if not may_differ(arguments) or not is_first_rank():
        return False
    checkpoint = open_checkpoint(folder)
    if checkpoint.format_reader.index is None:
        return False
    settings = (written or checkpoint.arguments).raw
    return are_lacking(checkpoint.random_state_grid(), arguments, megatron_version(), settings)


def refuse_another_kind(scope: Scope, call: Mapping[str, Any], directory: str | None) -> None:
    """Refuse a state of another kind of optimizer, which this package does not fill. Collective.

    Megatron reports all other errors.

    Raises:
        ResumeRefusedError: on every rank, if the checkpoint names another kind of optimizer than the running job.
    """
    arguments = scope["get_args"]()
    if arguments.ckpt_format == TORCH_DIST:
        agreed(_PHASE, lambda: _refuse_another_kind(scope, call, directory))


def _refuse_another_kind(scope: Scope, call: Mapping[str, Any], directory: str | None) -> None:
    arguments = scope["get_args"]()
    try:
        common, name, release, _ = _by_megatron(scope, call, directory)
    except (Exception, CheckpointException):  # noqa: BLE001 - stock Megatron meets it again and reports it
        return
    if common is None or release or "args" not in common:
        return
    written = JobArguments.of(vars(common["args"]))
    check_optimizer_was_saved(written, str(name))
    if is_another_kind(written, kind_named(vars(arguments))):
        found, expected = (f"--optimizer {kind_named(one)}" for one in (written.raw, vars(arguments)))
        raise another_kind_of_optimizer(found, expected, str(name))


def _by_megatron(scope: Scope, call: Mapping[str, Any], directory: str | None) -> Any:
    """Return the common state, the folder's name, True for a release, and the kind of checkpoint.

    It contains one collective (`read_metadata`), which precedes everything that can fail on single ranks, provided
    that all ranks see a tracker (`check_all_see`).
    """
    arguments = scope["get_args"]()
    context = {key: call[key] for key in ("checkpointing_context",) if key in call}
    return scope["_load_base_checkpoint"](directory, arguments, rank0=True, **context)
