"""What the formats that are written have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from mcore_ckpt_ext.storage.safe_pickle import Placeholder

# Of `param_group_identifier_keys` (megatron/core/optimizer/optimizer.py, core_v0.16 to 0.19) what groups differ in.
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr")


def portable_arguments(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments that every version can unpickle: without members of Megatron's own enums, which come and go.

    No loader reads these from a checkpoint; with `--use-checkpoint-args` a missing one keeps the job's own value
    (`load_args_from_checkpoint`, megatron/training/checkpointing.py).
    """
    return argparse.Namespace(**{name: value for name, value in vars(arguments).items() if not _has_object(value)})


def _has_object(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return any(_has_object(item) for item in value)
    if isinstance(value, dict):
        return any(_has_object(item) for item in value.values())
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, Placeholder)


def distinct_groups(groups: Iterable[Mapping[str, Any]], experts_apart: bool) -> list[list[dict[str, Any]]]:
    """The parameter groups of each chained optimizer, each group once: the dense parameters', then the experts'.

    A job whose experts are ordinary parameters has no group of experts; where it is to get them, they have the
    settings of the dense groups.
    """
    plain = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    dense = [{**group, "is_expert_parallel": False} for group in plain if not group.get("is_expert_parallel")]
    experts = [dict(group) for group in plain if group.get("is_expert_parallel")]
    if not experts_apart:
        return [_once(dense)]
    return [_once(dense), _once(experts or [{**group, "is_expert_parallel": True} for group in dense])]


def _once(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        found.setdefault(tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTITY), group)
    return list(found.values())
