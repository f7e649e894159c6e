"""Decides whether stock Megatron or this package loads an optimizer, by one list of checks.

A check describes one way in which stock Megatron fails to load an intact checkpoint, or loads another state. The first
check that applies decides; if none applies, stock Megatron loads. `MCORE_CKPT_EXT_EXPLAIN=1` prints the decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.job.releases import (
    MATCHES_GROUPS_BY_BOUNDS,
    MATCHES_GROUPS_BY_SETTINGS,
    OVERRIDES_BOUNDS_OF_GROUPS,
    TAKES_STEPS_OF_PRECISION_AWARE,
    Capability,
)
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import (
    check_supported,
    is_offloaded,
    is_precision_aware,
    keeps_remainders,
    omits_state,
)
from mcore_ckpt_ext.megatron.live.optimizer_adapters.inner_optimizers import is_sgd
from mcore_ckpt_ext.megatron.load_facts import LoadFacts, Loop
from mcore_ckpt_ext.megatron.param_group_compat import (
    has_confused_groups,
    has_other_rates,
    lacks_bias_correction,
    lacks_identity,
    lacks_live_group,
    overrides_own_bounds,
    shifts_groups,
)
from mcore_ckpt_ext.optimizers.stock_failures import (
    CPU_OFFLOADING,
    FP32_IN_PLACE,
    REMAINDERS_AS_FP32,
    SETTINGS_OF_FUSED_ADAM,
    SHIFTED_PARAMETERS,
)
from mcore_ckpt_ext.optimizers.table import encodings_named, shows_names, stock_can_load

WITHOUT_RANDOM_STATES = "without the random states, some of which it would not find"
_OPTIMIZER = "megatron/core/optimizer/distrib_optimizer.py"
_CHECKPOINTING = "megatron/training/checkpointing.py"
_MATCHES = "_filter_and_reorder_param_groups, megatron/core/optimizer/optimizer.py"
_MATCHES_BY_SETTINGS = f"{_MATCHES}, and {_OPTIMIZER}, 0.14.0 to 0.18.2"
_DCP = (Loop.MEGATRON, Loop.CORE)
_MEGATRON = (Loop.MEGATRON, Loop.LEGACY)
_ALL = (*_MEGATRON, Loop.CORE)


@dataclass(frozen=True)
class Check:
    """One way in which stock Megatron does not load an intact checkpoint correctly.

    Attributes:
        name: the name by which a decision refers to it.
        consequence: what stock Megatron does instead.
        source: the framework's function and file, with the versions that were read.
        applies: returns True if it happens in a load with these facts.
        loops: the loops that it concerns.
        requires: the check concerns only releases with this capability; None for all releases.
        excludes: the check concerns only releases without this capability; None for all releases.
    """

    name: str
    consequence: str
    source: str
    applies: Callable[[LoadFacts], bool]
    loops: tuple[Loop, ...] = _DCP
    requires: Capability | None = None
    excludes: Capability | None = None

    def concerns(self, facts: LoadFacts) -> bool:
        """Return True if the check concerns this kind of load and applies to it."""
        is_of_release = self.requires is None or self.requires.is_of(facts.version)
        is_over = self.excludes is not None and self.excludes.is_of(facts.version)
        return facts.loop in self.loops and is_of_release and not is_over and self.applies(facts)


@dataclass(frozen=True)
class LoadDecision:
    """The decision who loads the optimizer, and why; plain data, which ranks can exchange.

    Attributes:
        loop: the code that loads.
        optimizer_format: the names of the stored optimizer formats.
        is_moved: the parallel layout has changed.
        reason: the name of the check that keeps stock Megatron from loading; None if stock Megatron loads.
        omits_random_states: random states are reinitialized in either case, because the checkpoint lacks some that
            stock Megatron would request.
    """

    loop: Loop
    optimizer_format: str | None = None
    is_moved: bool = False
    reason: str | None = None
    omits_random_states: bool = False

    @property
    def is_stock(self) -> bool:
        """True if stock Megatron loads the optimizer."""
        return self.reason is None

    @property
    def check(self) -> Check | None:
        """The check that keeps stock Megatron from loading; None if stock Megatron loads."""
        return next((check for check in CHECKS if check.name == self.reason), None)

    def __str__(self) -> str:
        optimizer = f"the optimizer ({self.optimizer_format or 'format not needed'}) in {self.loop.value}"
        if self.check is None:
            names = ", ".join(check.name for check in CHECKS if self.loop in check.loops)
            omitted = f" {WITHOUT_RANDOM_STATES}" if self.omits_random_states else ""
            return f"stock Megatron loads {optimizer}{omitted}; none of these applies: {names}"
        return (
            f"this package fills {optimizer} because of: {self.check.name}. Stock Megatron cannot do this: "
            f"{self.check.consequence} ({self.check.source})"
        )


def decide(facts: LoadFacts) -> LoadDecision:
    """Return the decision for a load with these facts: the first check that applies, or stock Megatron."""
    reason = next((check.name for check in CHECKS if check.concerns(facts)), None)
    return LoadDecision(facts.loop, facts.optimizer_format, facts.is_moved, reason)


def _is_in_place(facts: LoadFacts) -> bool:
    return any(encoding.is_copied_in_place for encoding in encodings_named(facts.optimizer_format))


def _keeps_quantized_masters(facts: LoadFacts) -> bool:
    """Return True if quantized weights have masters that this package cannot fill."""
    try:
        check_supported(facts.chain.distributed)
    except UnsupportedCheckpointError:
        return True
    return False


def _any(kind: Callable[[object], bool], facts: LoadFacts) -> bool:
    return any(map(kind, facts.chain.distributed)) and not _keeps_quantized_masters(facts)


def _uses_torch_adam(facts: LoadFacts) -> bool:
    def is_fresh(child: object) -> bool:
        inner = getattr(child, "optimizer", None)
        return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) and not inner.state

    return _any(is_fresh, facts)


def _trains_views(facts: LoadFacts) -> bool:
    def holds_fp32(child: object) -> bool:
        return any(parameter.dtype == torch.float32 for parameter in getattr(child, "model_param_group_index_map", ()))

    return (facts.loop is Loop.LEGACY or _is_in_place(facts)) and _any(holds_fp32, facts)


def _has_other_count(facts: LoadFacts) -> bool:
    stored, live = facts.optimizer_counts or (0, 0)
    return stored > 0 and stored != live


def _distributes_otherwise(facts: LoadFacts) -> bool:
    stored = encodings_named(facts.optimizer_format)
    is_distributed = any(encoding.distributed for encoding in stored)
    return bool(facts.chain.whole) and is_distributed != bool(facts.chain.distributed)


CHECKS: tuple[Check, ...] = (
    Check(
        "files",
        "it does not read these files, or reads those of other ranks",
        f"_load_base_checkpoint, {_CHECKPOINTING}, 0.7.0 to 0.19.2",
        lambda facts: bool(facts.blockers),
        loops=(Loop.LEGACY,),
    ),
    Check(
        "format of Megatron-FSDP",
        "it finds none of the keys that it requests in another format than its own",
        f"_load_base_checkpoint, {_CHECKPOINTING}, 0.12.0 to 0.19.2",
        lambda facts: not facts.is_own_format,
        loops=(Loop.MEGATRON_FSDP,),
    ),
    Check(
        "optimizer of torch's FSDP",
        "its loader passes an argument that no chained optimizer takes",
        f"load_checkpoint, {_CHECKPOINTING}, 0.12.1 to 0.19.2",
        lambda facts: True,
        loops=(Loop.TORCH_FSDP,),
    ),
    Check(
        "optimizer arguments",
        "it copies the stored numbers into masters of another kind without a message",
        "torch/distributed/checkpoint; seen with 0.19.0 and 0.19.2",
        lambda facts: bool(facts.differing_arguments()),
        loops=_ALL,
    ),
    Check(
        "learning rates",
        "it fails, because the bounds of its parameter groups differ",
        "param_group_identifier_keys, megatron/core/optimizer/optimizer.py, 0.19.0 to 0.19.2",
        lambda facts: has_other_rates(facts.written, facts.running),
        loops=_MEGATRON,
        requires=MATCHES_GROUPS_BY_BOUNDS,
    ),
    Check(
        "bounds of single groups",
        "it gives every group the bounds of the arguments",
        f"load_checkpoint, {_CHECKPOINTING}, development head of August 2026",
        lambda facts: overrides_own_bounds(facts.running, facts.chain),
        loops=_MEGATRON,
        requires=OVERRIDES_BOUNDS_OF_GROUPS,
    ),
    Check(
        "new tokens",
        "it fills the rows of tokens that the checkpoint lacks with zeros",
        "allow_shape_mismatch, megatron/core/dist_checkpointing/strategies/torch.py, 0.7.0 to 0.19.2",
        lambda facts: facts.has_new_tokens,
        loops=_MEGATRON,
    ),
    Check(
        "another model",
        "it leaves out parameters that only the checkpoint has; without those that it lacks, some ranks fail",
        "StrictHandling, megatron/core/dist_checkpointing/validation.py, 0.8.0 to 0.19.2",
        lambda facts: (
            shows_names(facts.optimizer_format) and facts.changes_model and not _keeps_quantized_masters(facts)
        ),
        loops=(Loop.MEGATRON,),
    ),
    Check(
        "layer-wise files",
        "every rank opens the file of its own data-parallel number",
        f"load_checkpoint, {_CHECKPOINTING}, 0.16.1 to 0.19.2",
        lambda facts: not facts.has_own_files(),
        loops=(Loop.LEGACY,),
    ),
    Check(
        "distributed or not",
        "it requests keys that the other kind of optimizer does not store",
        "sharded_state_dict, megatron/core/optimizer/optimizer.py, 0.16.1 to 0.19.2",
        _distributes_otherwise,
    ),
    Check(
        "number of groups",
        "it merges parameter groups by position, and fails if their numbers differ",
        "merge, megatron/core/dist_checkpointing/dict_utils.py, 0.16.1 to 0.19.2",
        lambda facts: bool(facts.chain.whole) and not facts.has_as_many_groups(),
    ),
    Check(
        "empty groups",
        "it drops empty groups of masters, and copies those of the groups after them into other groups",
        "extract_matching_values, megatron/core/dist_checkpointing/dict_utils.py, 0.16.1 to 0.19.2",
        lambda facts: shifts_groups(facts.chain),
    ),
    Check(
        "number of optimizers",
        "it loads as many chained optimizers as were saved, and fails if the job has another number",
        "ChainedOptimizer.load_state_dict, megatron/core/optimizer/optimizer.py, 0.7.0 to 0.19.2",
        lambda facts: not facts.chain.whole and _has_other_count(facts),
    ),
    Check(
        "SGD",
        "it calls init_state_fn, which is None, before every load",
        "_get_megatron_optimizer_based_on_param_groups, megatron/core/optimizer/__init__.py, 0.16.1 to 0.19.2",
        lambda facts: any(is_sgd(child.optimizer) for child, _ in facts.chain.whole),
    ),
    Check(*CPU_OFFLOADING, lambda facts: _any(is_offloaded, facts)),
    Check(
        "moments of another optimizer",
        "it loads the moments of the job's optimizer: next to Lion, Adam loses its second moment",
        f"optimizer_state_keys, {_OPTIMIZER}, 0.19.2 and the development head of August 2026",
        lambda facts: any(map(omits_state, facts.chain.distributed)),
    ),
    Check(
        "precision-aware, in place",
        "it treats a flag as a tensor",
        f"_set_main_param_and_optimizer_states, {_OPTIMIZER}, up to 0.16.1",
        lambda facts: _is_in_place(facts) and _any(is_precision_aware, facts),
        excludes=TAKES_STEPS_OF_PRECISION_AWARE,
    ),
    Check(*REMAINDERS_AS_FP32, lambda facts: not _is_in_place(facts) and _any(keeps_remainders, facts)),
    Check(
        "torch's Adam",
        "it asserts that all parameters have one step, but there is none before the first",
        f"state_dict, {_OPTIMIZER}, 0.10.0 to 0.19.2",
        _uses_torch_adam,
    ),
    Check(*FP32_IN_PLACE, _trains_views, loops=(*_DCP, Loop.LEGACY)),
    Check(
        "layout",
        "it refuses the layout, or mixes up the state of different parameters",
        f"load_checkpoint, {_CHECKPOINTING}; load_state_dict, {_OPTIMIZER}, 0.7.0 to 0.19.2",
        lambda facts: not stock_can_load(facts.optimizer_format, facts.is_moved, facts.version),
    ),
    Check(*SHIFTED_PARAMETERS, lambda facts: facts.is_shifted(), loops=(Loop.CORE,)),
    Check(
        "group settings",
        "it fails if a stored parameter group lacks a setting that distinguishes groups",
        _MATCHES_BY_SETTINGS,
        lambda facts: lacks_identity(facts.stored_groups()),
        requires=MATCHES_GROUPS_BY_SETTINGS,
        excludes=MATCHES_GROUPS_BY_BOUNDS,
    ),
    Check(
        "groups with rates of their own",
        "it gives parameter groups that differ in learning rates alone the rates of the last one",
        _MATCHES_BY_SETTINGS,
        lambda facts: has_confused_groups(facts.stored_groups()),
        requires=MATCHES_GROUPS_BY_SETTINGS,
        excludes=MATCHES_GROUPS_BY_BOUNDS,
    ),
    Check(
        "parameter groups",
        "it does not find a live parameter group among the stored ones, and fails",
        f"{_MATCHES}, 0.19.0 to 0.19.2",
        lambda facts: lacks_live_group(facts.stored_groups(), facts.chain),
        requires=MATCHES_GROUPS_BY_BOUNDS,
    ),
    Check(
        "before the first step",
        "it requests moments, which do not exist before the first step, and fails",
        f"_init_optimizer_states_with_dummy_values, {_OPTIMIZER}; init_state_fn, optimizer.py, 0.16.1 to 0.19.2",
        lambda facts: facts.is_before_first_step(),
    ),
    Check(
        *SETTINGS_OF_FUSED_ADAM,
        lambda facts: lacks_bias_correction(facts.stored_groups(), facts.chain),
        loops=_ALL,
    ),
    Check(
        "order in the buffers",
        "it mixes up the state of parameters of the same size",
        f"load_parameter_state_from_dp_reshardable, {_OPTIMIZER}, 0.7.0 to 0.19.2",
        lambda facts: facts.is_packed_otherwise,
    ),
)

ARGUMENT_CHECKS = ("optimizer arguments", "learning rates", "bounds of single groups")
"""The checks that do not depend on the stored optimizer, whose format may then be unknown."""
