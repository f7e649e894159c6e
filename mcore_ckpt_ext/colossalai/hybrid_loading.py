"""Loads a whole state into a job with HybridParallelPlugin, once all ranks have checked that it fits."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mcore_ckpt_ext.collectives import OPTIMIZER_UNCHANGED
from mcore_ckpt_ext.colossalai import tensor_parallel
from mcore_ckpt_ext.colossalai.hybrid_cuts import PADDING, refuse_shape, working_parameter
from mcore_ckpt_ext.colossalai.loading import StateDictMismatchError
from mcore_ckpt_ext.colossalai.optimizer import State
from mcore_ckpt_ext.colossalai.ranks import Ranks
from mcore_ckpt_ext.colossalai.state_digest import Digests, digests, same_digests
from mcore_ckpt_ext.colossalai.wrapper import persistent_buffers
from mcore_ckpt_ext.errors import ModelMismatchError, ResumeRefusedError, join_some, quantity

_MODEL_UNTOUCHED = "the model is unchanged"


def load_optimizer(checkpoint_io: Any, ranks: Ranks, optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Load an optimizer's whole state, saved under any layout, after all ranks have checked it."""
    groups: list[dict[str, Any]] = state_dict["param_groups"]
    live = optimizer.optim.param_groups
    ids = optimizer.param_info["param2id"]
    id_map = {ids[id(working_parameter(optimizer, stepped))]: stepped for group in live for stepped in group["params"]}
    by_id: dict[int, State] = {int(key): state for key, state in state_dict["state"].items()}

    def inspect_here() -> tuple[Digests, None]:
        if len(groups) != len(live):
            raise ModelMismatchError(
                "the optimizer state has other param groups", found=str(len(groups)), expected=str(len(live))
            )
        known_keys = {key for group in optimizer.param_info["param_groups"] for key in group["params"]}
        if unknown := sorted(set(by_id) - known_keys):
            raise ModelMismatchError(
                "the optimizer state belongs to other parameters",
                found=f"state of parameter {unknown[0]}",
                expected=quantity(len(known_keys), "parameter"),
            )
        for key, stepped in id_map.items():
            shape = tensor_parallel.whole_shape(working_parameter(optimizer, stepped))
            for name, value in by_id.get(key, {}).items():
                if isinstance(value, torch.Tensor) and name != "step" and not name.endswith(PADDING):
                    refuse_shape(f"{name} of parameter {key}", value.shape, shape)
        return digests({"param_groups": groups, "state": by_id}), None

    same_digests(ranks, "load_optimizer", {}, inspect_here, OPTIMIZER_UNCHANGED)
    for group, saved in zip(live, groups, strict=True):
        params = group["params"]
        group.clear()
        group.update(copy.deepcopy(saved), params=params)
    for stepped in id_map.values():
        optimizer.optim.state.pop(stepped, None)
    checkpoint_io.load_states_into_optimizer(optimizer, by_id, id_map)
    from colossalai.checkpoint_io.utils import sharded_optimizer_loading_epilogue

    sharded_optimizer_loading_epilogue(optimizer.optim)


def load_model(ranks: Ranks, model: Any, entries: dict[str, Any], strict: bool) -> None:
    """Load a whole state dict, after all ranks have checked that it fits all stages together.

    Raises:
        StateDictMismatchError: on all ranks; nothing is written.
    """
    module = model.unwrap()
    model._force_wait_all_gather()
    aliases = _aliases(ranks, model)
    offered = dict(entries)
    for names in aliases:
        given = next((name for name in names if name in entries), None)
        offered.update((name, entries[given]) for name in names if given is not None and name not in entries)

    def inspect_here() -> tuple[Digests, set[str]]:
        expected = _expected_shapes(module)
        if strict and (missing := [name for name in expected if name not in offered]):
            raise ModelMismatchError(
                f"Missing key(s) in state_dict: {_quote(missing)}", found=f"{len(missing)} of them"
            )
        for name, shape in expected.items():
            if name in offered and offered[name].shape != shape:
                raise ModelMismatchError(
                    f"size mismatch for {name}", found=tuple(offered[name].shape), expected=tuple(shape)
                )
        return digests(entries, own={name for name, _ in persistent_buffers(module)}), set(expected)

    try:
        inspected = same_digests(ranks, "load_model", {"strict": strict}, inspect_here, _MODEL_UNTOUCHED)
    except ResumeRefusedError as error:
        raise StateDictMismatchError(str(error)) from error
    known_names = set().union(*(names for _, names in inspected.values()), *aliases)
    unexpected = sorted(name for name in entries if name not in known_names and not name.endswith("_extra_state"))
    if strict and unexpected:
        raise StateDictMismatchError(
            f"Unexpected key(s) in state_dict: {_quote(unexpected)}",
            found=f"{len(unexpected)} of them",
            hint="strict=False loads the rest",
        )
    masks = [(parameter, tensor_parallel.is_padding(parameter)) for parameter in module.parameters()]
    paddings = [(parameter, parameter.detach().clone(), mask) for parameter, mask in masks if mask is not None]
    # ColossalAI pads in place (0.5.0, tensor/padded_tensor/api.py: to_padded_tensor), so it gets views.
    views = {name: v.view_as(v) if isinstance(v, torch.Tensor) else v for name, v in offered.items()}
    module.load_state_dict(views, strict=False)
    for parameter, before, is_padding in paddings:
        # ColossalAI sets padding rows to zero, as model files do not contain them.
        parameter.data.copy_(torch.where(is_padding.to(before.device), before, parameter.data))
    model.update_master_params()


def _quote(names: Iterable[str]) -> str:
    return join_some([f'"{name}"' for name in names])


def _expected_shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Return the names in this stage's module, with their whole shapes."""
    named = module.named_parameters(remove_duplicate=False)
    shapes = {name: tensor_parallel.whole_shape(parameter) for name, parameter in named}
    return shapes | {name: buffer.shape for name, buffer in persistent_buffers(module)}


def _aliases(ranks: Ranks, model: Any) -> list[set[str]]:
    """Return sets of names of one parameter: on one stage, and across stages (``shared_params``)."""
    names: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.unwrap().named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).add(name)
    stage = model.stage_manager.stage if model.stage_manager is not None else None
    across = [names.get(shared[stage], set()) if stage in shared else set() for shared in model.shared_params]
    groups = [set().union(*of_all) for of_all in zip(*ranks.gather(across), strict=True)]
    return [*groups, *(some for some in names.values() if len(some) > 1 and not any(some & group for group in groups))]
