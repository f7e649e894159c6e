"""State that other versions and ranks can load: the common state, and each parameter group once."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.errors import (
    UnreadableCheckpointError,
    UnsupportedCheckpointError,
    escape,
    format_value,
    join_some,
    quantity,
)
from mcore_ckpt_ext.formats.expert_states import carried_state, emptied_state, states_of_experts
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import PARTIAL, JobArguments
from mcore_ckpt_ext.optimizers.groups import NOT_SETTINGS, REFINED_IDENTITY, identity, rule_of, with_defaults
from mcore_ckpt_ext.storage.pickle_allowlist import first_unwritable
from mcore_ckpt_ext.storage.te_extra_state import UnknownStateError

WRITTEN_FOR = "mcore_ckpt_ext_written_for"
"""The argument that marks a converted checkpoint: the version of Megatron that it was written for.

In a checkpoint without arguments, a key of the common state.
"""
SHARDING_MARK = "param_state_sharding_type"
"""A key that only distributed optimizers in a chain have."""

# Megatron Core's order of the rows of attention (`set_checkpoint_version`, megatron/training/checkpointing.py).
# Training loops other than Megatron's do not store it.
_VERSION = 3.0
_OF_FSDP = ("use_megatron_fsdp", "use_torch_fsdp2")
# `rerun_state_machine` is stored for the ranks of the job; stock Megatron ignores it when the layout has changed.
_NOT_CARRIED = ("optimizer", "content_metadata", "rerun_state_machine", "args", WRITTEN_FOR)
# Members of Megatron's own enums change between versions; `--use-checkpoint-args` does not need them.
_ENUMS = ("megatron.core.", "signal.Signals", "megatron.training.")


@dataclass(frozen=True)
class PortableState:
    """The state of a checkpoint, other than tensors, that another job can load.

    Attributes:
        common: the common state, with `args`, but without the optimizer.
        extra_states: the modules' extra states, by model-space name.
        random_states: the states of the random generators by rank; empty if one of them cannot be written.
        notes: a line for everything that was left out.
    """

    common: dict[str, Any]
    extra_states: Mapping[str, Any]
    random_states: Mapping[tuple[int, ...], Any]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, checkpoint: CheckpointView, arguments: argparse.Namespace, version: tuple[int, int]) -> PortableState:
        """Return the portable state of a checkpoint.

        Args:
            checkpoint: the source.
            arguments: Megatron's arguments of the job that will read it.
            version: the version of Megatron that will read it.
        """
        stored = {key: value for key, value in checkpoint.job.common().items() if key not in _NOT_CARRIED}
        defaults = {"checkpoint_version": _VERSION, "iteration": checkpoint.job.iteration()}
        common, notes = _writable({**defaults, **stored}, "the common state")
        common["args"], about_arguments = portable_arguments(arguments, version)
        states, about_experts = states_of_experts(
            checkpoint.states.extra(), checkpoint.job.arguments().num_experts or 0
        )
        extra_states, about_extra_states = writable_extra_states(states)
        random_states, about_random_states = _writable_random_states(checkpoint)
        notes += [*about_arguments, *about_experts, *about_extra_states, *about_random_states]
        return cls(common, extra_states, random_states, tuple(notes))


def known_arguments(arguments: JobArguments) -> argparse.Namespace:
    """Return the known arguments of a job as a checkpoint stores them, marked if they are incomplete."""
    marks = {} if arguments.is_complete else {PARTIAL: True}
    return argparse.Namespace(**{**arguments.raw, **disable_fsdp(arguments), **marks})


def disable_fsdp(arguments: JobArguments) -> dict[str, Any]:
    """Return arguments that disable Megatron-FSDP and torch FSDP2 where the job's arguments enable them."""
    return {name: False for name in _OF_FSDP if arguments.raw.get(name)}


def portable_arguments(arguments: argparse.Namespace, version: tuple[int, int]) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments that every version can unpickle, and a note for each of the others.

    Members of Megatron's own enums are left out without a note. No loader reads them from a checkpoint: with
    `--use-checkpoint-args` a missing argument keeps the job's own value (`load_args_from_checkpoint`,
    megatron/training/checkpointing.py).
    """
    kept, notes = _writable(vars(arguments), "the arguments", unmentioned=_ENUMS)
    return argparse.Namespace(**{**kept, WRITTEN_FOR: f"{version[0]}.{version[1]}"}), notes


def writable_extra_states(states: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return extra states that are safe to load, with notes on those written empty.

    Loading a state imports and calls the objects that its pickle names. So a state keeps its content only if that
    consists of data and known recipes, and is otherwise written empty.
    """
    written: dict[str, Any] = {}
    emptied = []
    for name, state in states.items():
        try:
            written[name] = carried_state(state)
            is_writable = first_unwritable(written[name]) is None
        except UnknownStateError:
            is_writable = False
        if not is_writable:
            emptied.append(name)
            written[name] = emptied_state(state)
    if not emptied:
        return written, []
    return written, [
        f"extra states of {quantity(len(emptied), 'module')} are written empty, for they hold pickles with other "
        f"classes than this package writes (fp8 scaling is reinitialized): {join_some([*map(escape, emptied)], 1)}"
    ]


def _writable_random_states(checkpoint: CheckpointView) -> tuple[Mapping[tuple[int, ...], Any], list[str]]:
    states = checkpoint.states.random()
    reason = next((unwritable for state in states.values() if (unwritable := first_unwritable(state))), None)
    if reason is None:
        return states, []
    return {}, [f"the random states are left out: one names {escape(reason)}"]


def _writable(
    state: Mapping[Any, Any], description: str, unmentioned: tuple[str, ...] = ()
) -> tuple[dict[Any, Any], list[str]]:
    """Return the entries that may be written, and a note for each of the others.

    Args:
        state: entries by name.
        description: a description of `state` for the notes.
        unmentioned: prefixes of names of classes that are left out without a note.
    """
    reasons = {key: reason for key, value in state.items() if (reason := first_unwritable(value)) is not None}
    notes = [
        f"left out of {description}: {escape(key)}, which names {escape(reason)}"
        for key, reason in reasons.items()
        if not reason.startswith(unmentioned)
    ]
    return {key: value for key, value in state.items() if key not in reasons}, notes


def distinct_groups(groups: Iterable[Mapping[str, Any]], has_expert_optimizer: bool) -> list[list[dict[str, Any]]]:
    """Return each chained optimizer's distinct parameter groups: dense parameters', then experts'.

    If the source lacks groups for one of them, these get the settings of the others. In a single optimizer all groups
    are dense parameters'; those that differ in nothing else are one.
    """
    plain = with_defaults(map(portable_group, groups))

    def mark(chosen: Iterable[Mapping[str, Any]], of_experts: bool) -> list[dict[str, Any]]:
        return once({**group, "is_expert_parallel": of_experts} for group in chosen)

    if not has_expert_optimizer:
        return [mark(plain, False)]
    dense = [group for group in plain if not group.get("is_expert_parallel")]
    experts = [group for group in plain if group.get("is_expert_parallel")]
    return [mark(dense or experts, False), mark(experts or dense, True)]


def portable_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's settings, without its parameters.

    `HybridDeviceOptimizer` keeps the classes of its optimizers in every group, but no loader reads them, so they are
    left out (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, core_v0.12.0 to 0.19.2). Any other setting
    that cannot be written is refused when the file is laid out, because all settings must be carried over.
    """
    return {key: value for key, value in group.items() if key not in NOT_SETTINGS}


def portable_chain(chain: Iterable[Mapping[str, Any]], has_expert_optimizer: bool) -> list[dict[str, Any]]:
    """Return each chained optimizer's settings, for a job with or without separate expert optimizers.

    Raises:
        UnsupportedCheckpointError: experts would move between chained optimizers of different kinds.
    """
    children = [portable_child(child) for child in chain]
    groups = [group for child in children for group in inner_state(child)["param_groups"]]
    if not children or has_experts(children) == has_expert_optimizer:
        return children
    if len({frozenset(group) - {"is_expert_parallel"} for group in groups}) > 1:
        raise UnsupportedCheckpointError(
            "experts cannot move into or out of an optimizer of their own: their place among the chained "
            "optimizers is unknown",
            found=f"{len(children)} chained optimizers of different kinds",
            hint="keep the expert-parallel size",
        )
    first = children[0]
    return [
        {**first, "optimizer": {**inner_state(first), "param_groups": child_groups}}
        for child_groups in distinct_groups(groups, has_expert_optimizer)
    ]


def mark_undistributed(chain: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the same chain with every optimizer marked as not distributed."""
    return [{key: value for key, value in child.items() if key != SHARDING_MARK} for child in chain]


def has_experts(chain: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether some chained optimizer has parameter groups for experts."""
    return any(group.get("is_expert_parallel") for child in chain for group in inner_state(child)["param_groups"])


def inner_state(child: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the inner optimizer's settings from a chained one's; `FP32Optimizer` does not nest them."""
    inner = child.get("optimizer", child)
    return inner if isinstance(inner, dict) and "param_groups" in inner else {"param_groups": []}


def portable_child(child: Mapping[str, Any]) -> dict[str, Any]:
    """Return one chained optimizer's settings: groups, scaler, and the step if no group has it."""
    inner: dict[str, Any] = {"param_groups": with_defaults(map(portable_group, inner_state(child)["param_groups"]))}
    step = (inner_state(child).get("state") or {}).get("common_step")
    if step is not None:
        inner["state"] = {"common_step": step}
    if "optimizer" not in child:
        return inner
    kept = {key: child[key] for key in ("grad_scaler", SHARDING_MARK) if key in child}
    return {"optimizer": inner, **kept}


def several_steps(found: Mapping[float, str], where: str) -> UnreadableCheckpointError:
    """Return the error for an optimizer with several steps; `found` has each with one of its locations."""
    return UnreadableCheckpointError(
        "the optimizer's step is stored more than once, with different values",
        found="; ".join(f"{step:g} in {place}" for step, place in sorted(found.items())),
        expected="the same step everywhere",
        where=where,
        hint="the checkpoint is damaged, or mixes several checkpoints: use another iteration",
    )


def once(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove repeated groups, which have the same identifying settings.

    Settings that the writer left out have the values of `with_defaults`.

    Raises:
        UnreadableCheckpointError: two copies of a group differ in another setting; steps are compared elsewhere.
    """
    distinct: dict[tuple[Any, ...], dict[str, Any]] = {}
    groups = list(groups)
    for group, whole in zip(groups, with_defaults(groups), strict=True):
        first = distinct.setdefault((rule_of(whole), *identity(whole, REFINED_IDENTITY)), group)
        differing = [key for key in first.keys() & group.keys() - {"step"} if repr(first[key]) != repr(group[key])]
        if differing:
            key = min(differing)
            raise UnreadableCheckpointError(
                "ranks stored different settings of the same parameter group",
                found=f"{escape(key)} {format_value(first[key])} and {format_value(group[key])}",
                expected="the same on all ranks",
                hint="the checkpoint was edited, or mixes several checkpoints: use another iteration",
            )
    return list(distinct.values())
