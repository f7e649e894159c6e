"""State that other versions and other ranks can take over: arguments, and parameter groups each once."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, printable
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.optimizers.groups import REFINED_IDENTITY, identity
from mcore_ckpt_ext.storage.archive_layout import archive_layout
from mcore_ckpt_ext.storage.writable import first_unwritable, hides_a_pickle

WRITTEN_FOR = "mcore_ckpt_ext_written_for"
"""The argument by which a converted checkpoint is known: the version of Megatron that it was written for."""
_NOT_SETTINGS = {"params", "cpu_optimizer_cls", "gpu_optimizer_cls"}


def portable_arguments(
    arguments: argparse.Namespace, version: tuple[int, int], notes: list[str]
) -> argparse.Namespace:
    """The arguments that every version can unpickle: without members of Megatron's own enums, which come and go.

    What else may not be written is left out with one of the `notes`.

    No loader reads these from a checkpoint; with `--use-checkpoint-args` a missing one keeps the job's own value
    (`load_args_from_checkpoint`, megatron/training/checkpointing.py).
    """
    found = {}
    for name, value in vars(arguments).items():
        reason = first_unwritable(value)
        if reason is None:
            found[name] = value
        elif not reason.startswith(_ENUMS):
            notes.append(f"left out of the arguments: {printable(name)}, which names {printable(reason)}")
    return argparse.Namespace(**{**found, WRITTEN_FOR: f"{version[0]}.{version[1]}"})


# Classes of arguments of honest jobs, which `--use-checkpoint-args` does without.
_ENUMS = ("megatron.core.", "signal.Signals", "megatron.training.")


def writable_state(state: Mapping[Any, Any], notes: list[str]) -> dict[Any, Any]:
    """Of a common state what may be written; of the rest `notes` are made, an entry each."""
    found = {}
    for key, value in state.items():
        reason = first_unwritable(value)
        if reason is None:
            found[key] = value
        else:
            notes.append(f"left out of the common state: {printable(key)}, which names {printable(reason)}")
    return found


def writable_extra_states(checkpoint: Checkpoint, notes: list[str]) -> dict[str, Any]:
    """The extra states; emptied, with one of the `notes`, where they hold what their owner would run on loading."""
    found, emptied = {}, []
    for name, state in checkpoint.extra_states().items():
        content = _content(state)
        safe = first_unwritable(state) is None and not (content is not None and hides_a_pickle(content))
        found[name] = state if safe else _empty(state)
        emptied += [] if safe else [name]
    if emptied:
        notes.append(
            f"extra states of {len(emptied)} modules are written empty, for they hold pickles with other classes than "
            f"this package writes (fp8 scaling begins anew): {printable(emptied[0])} and so on"
        )
    return found


def writable_random_states(checkpoint: Checkpoint, notes: list[str]) -> Mapping[tuple[int, ...], Any]:
    """The random states of the ranks, or none, with one of the `notes`, where one may not be written."""
    states = checkpoint.random_states()
    reason = next((found for state in states.values() if (found := first_unwritable(state))), None)
    if reason is None:
        return states
    notes.append(f"the random states are left out: one names {printable(reason)}")
    return {}


def _content(state: Any) -> bytes | None:
    """The bytes that Transformer Engine unpickles: a stream, or a tensor of bytes."""
    if isinstance(state, io.BytesIO):
        return state.getvalue()
    if isinstance(state, torch.Tensor):
        return state.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return bytes(state) if isinstance(state, (bytes, bytearray)) else None


def _empty(state: Any) -> Any:
    """An extra state of the same type that says nothing."""
    if not isinstance(state, io.BytesIO):
        return torch.empty(0, dtype=torch.uint8)
    content = bytearray(archive_layout(None).length)
    for position, data in archive_layout(None).literals:
        content[position : position + len(data)] = data
    return io.BytesIO(bytes(content))


def distinct_groups(groups: Iterable[Mapping[str, Any]], experts_apart: bool) -> list[list[dict[str, Any]]]:
    """The parameter groups of each chained optimizer, each group once: the dense parameters', then the experts'.

    A job whose experts are ordinary parameters has no group of experts; where it is to get them, they have the
    settings of the dense groups.
    """
    plain = [portable_group(group) for group in groups]
    dense = [{**group, "is_expert_parallel": False} for group in plain if not group.get("is_expert_parallel")]
    experts = [dict(group) for group in plain if group.get("is_expert_parallel")]
    if not experts_apart:
        return [once(dense)]
    return [once(dense), once(experts or [{**group, "is_expert_parallel": True} for group in dense])]


def portable_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's settings, without its parameters.

    `HybridDeviceOptimizer` keeps the classes of its optimizers in every group, which no loader takes from there: they
    are left out (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, core_v0.12.0 to 0.19.2). Whatever else
    cannot be written is refused when it is: settings are part of what must be carried.
    """
    return {key: value for key, value in group.items() if key not in _NOT_SETTINGS}


def portable_chain(chain: Iterable[Mapping[str, Any]], experts_apart: bool) -> list[dict[str, Any]]:
    """The settings of each chained optimizer, for a job in which experts have optimizers of their own, or have not.

    Raises:
        UnsupportedCheckpointError: optimizers of different kinds would have to take experts in or give them away.
    """
    children = [portable_child(child) for child in chain]
    groups = [group for child in children for group in inner_state(child)["param_groups"]]
    if not children or any(group.get("is_expert_parallel") for group in groups) == experts_apart:
        return children
    if len({frozenset(group) - {"is_expert_parallel"} for group in groups}) > 1:
        raise UnsupportedCheckpointError(
            "experts cannot move into or out of an optimizer of their own: which of the chained optimizers would take "
            "them is not known",
            found=f"{len(children)} chained optimizers of different kinds",
            helps="keep the expert parallel size",
        )
    first = children[0]
    return [
        {**first, "optimizer": {**inner_state(first), "param_groups": own}}
        for own in distinct_groups(groups, experts_apart)
    ]


def inner_state(child: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inner optimizer's part of a chained optimizer's settings: `FP32Optimizer` stores nothing around it."""
    inner = child.get("optimizer", child)
    return inner if isinstance(inner, dict) and "param_groups" in inner else {"param_groups": []}


def portable_child(child: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one chained optimizer: its groups, its scaler, and a step where it is no group's."""
    inner: dict[str, Any] = {"param_groups": [portable_group(group) for group in inner_state(child)["param_groups"]]}
    step = (inner_state(child).get("state") or {}).get("common_step")
    if step is not None:
        inner["state"] = {"common_step": step}
    if "optimizer" not in child:
        return inner
    kept = {key: child[key] for key in ("grad_scaler", "param_state_sharding_type") if key in child}
    return {"optimizer": inner, **kept}


def once(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups without repetitions, by what tells groups apart."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        found.setdefault(identity(group, REFINED_IDENTITY), group)
    return list(found.values())
