"""Whether stock Megatron finds its parameter groups among those that are stored, and leaves them what is theirs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.common_state import common_optimizers
from mcore_ckpt_ext.hooks.running_version import megatron_version
from mcore_ckpt_ext.online.agreement import attempt, is_first_rank
from mcore_ckpt_ext.online.homes.recognition import Chain


def forgets_rates(written: JobArguments, chain: Chain, arguments: Any) -> bool:
    """Whether stock fails to find its parameter groups, whose learning rates' bounds are others, or sets them alike.

    Sources: `param_group_identifier_keys` (megatron/core/optimizer/optimizer.py, core_v0.19.0 to 0.19.2), which has it
    end by an error; `load_checkpoint` of the development head of August 2026, which under
    `--override-opt_param-scheduler` gives every group the arguments' bounds, also one of --use-mup that has its own.
    """
    running, rates, version = vars(arguments), ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"), megatron_version()
    stated = [rate for rate in rates if rate in written.stated and rate in running]
    if version >= (0, 19) and any(written.stated[rate] != running[rate] for rate in stated):
        return True
    if version < (0, 20) or not running.get("override_opt_param_scheduler"):
        return False
    live = [group for child in (*chain.distributed, *(one for one, _ in chain.whole)) for group in _groups_of(child)]

    def is_its_own(group: Mapping[str, Any], bound: str, rate: str) -> bool:
        wanted = running.get(f"decoupled_{rate}" if group.get("is_decoupled_lr") else rate)
        return wanted is not None and group.get(bound) not in (None, wanted)

    return any(is_its_own(group, *names) for group in live for names in (("max_lr", "lr"), ("min_lr", "min_lr")))


def loses_its_groups(folder: Path, chain: Chain) -> bool:
    """Whether stock does not find a live parameter group among the stored ones, and ends by KeyError or ValueError.

    It compares what identifies them (`_filter_and_reorder_param_groups`, megatron/core/optimizer/optimizer.py,
    core_v0.19.0 to 0.19.2 and the development head of August 2026); a job of before 0.19 that went on with new learning
    rates has kept the bounds of the old ones in its groups. Told by the first rank, whose look counts.
    """
    keys = getattr(sys.modules.get("megatron.core.optimizer.optimizer"), "param_group_identifier_keys", ())
    if megatron_version() < (0, 19) or not is_first_rank():
        return False
    stored: list[Any] = []
    attempt(lambda: stored.extend(open_checkpoint(folder).param_groups()))  # stock tells what is wrong

    def identifier(group: Mapping[str, Any]) -> list[Any]:
        return [group[key] if key in group else group.get(f"pre_{key}") for key in keys]

    known: list[list[Any]] = []
    for found in map(identifier, stored):
        if found not in known:
            known.append(found)
    live = [group for child in chain.distributed for group in _groups_of(child)]
    return bool(stored) and any(identifier(group) not in known for group in live)


def has_the_same_groups(common: Mapping[str, Any], chain: Chain) -> bool:
    """Whether the optimizers of whole parameters have as many parameter groups as were saved of them."""
    children = [child.get("optimizer", child) for child in common_optimizers(common)]
    stored = [len(child["param_groups"]) for child in children if "param_groups" in child]
    live = [len(child.optimizer.param_groups) for child, _ in chain.whole]
    # Those of a DistributedOptimizer may be stored elsewhere, and come last.
    return not stored or stored == live or (bool(chain.distributed) and stored[: len(live)] == live)


def _groups_of(child: Any) -> Sequence[Mapping[str, Any]]:
    groups: Sequence[Mapping[str, Any]] = child.optimizer.param_groups
    return groups
