"""Loads whole states with the other plugins than Gemini's, once all ranks have checked that they fit."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from mcore_ckpt_ext.collectives import OPTIMIZER_UNCHANGED
from mcore_ckpt_ext.colossalai.hybrid_cuts import refuse_loaded_shapes, working_parameter
from mcore_ckpt_ext.colossalai.loading import Accepted, StateDictMismatchError, accept, names_of_each_rank, write
from mcore_ckpt_ext.colossalai.lost_states import drop_outdated, names_without_state, warn_of_missing_states
from mcore_ckpt_ext.colossalai.optimizer import State
from mcore_ckpt_ext.colossalai.ranks import Ranks
from mcore_ckpt_ext.colossalai.state_digest import Digests, digests, same_digests
from mcore_ckpt_ext.colossalai.wrapper import inspect_module
from mcore_ckpt_ext.errors import ModelMismatchError, ResumeRefusedError, join_some, quantity

_MODEL_UNTOUCHED = "the model is unchanged"


def load_optimizer(checkpoint_io: Any, ranks: Ranks, optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Load an optimizer's whole state, saved under any layout, after all ranks have checked it."""
    state_dict = drop_outdated(state_dict)
    groups: list[dict[str, Any]] = state_dict["param_groups"]
    live = optimizer.optim.param_groups
    ids = optimizer.param_info["param2id"]
    id_map = {ids[id(working_parameter(optimizer, stepped))]: stepped for group in live for stepped in group["params"]}
    by_id: dict[int, State] = {int(key): state for key, state in state_dict["state"].items()}

    def inspect_here() -> Iterable[int]:
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
            refuse_loaded_shapes(key, by_id.get(key, {}), working_parameter(optimizer, stepped))
        return id_map

    accept_states(ranks, "load_optimizer", {"param_groups": groups, "state": by_id}, inspect_here)
    for group, saved in zip(live, groups, strict=True):
        params = group["params"]
        group.clear()
        group.update(copy.deepcopy(saved), params=params)
    for stepped in id_map.values():
        optimizer.optim.state.pop(stepped, None)
    checkpoint_io.load_states_into_optimizer(optimizer, by_id, id_map)
    from colossalai.checkpoint_io.utils import sharded_optimizer_loading_epilogue

    sharded_optimizer_loading_epilogue(optimizer.optim)


def accept_states(
    ranks: Ranks,
    call: str,
    state_dict: Mapping[str, Any],
    inspect_here: Callable[[], Iterable[int]],
    *,
    is_same: bool = True,
) -> None:
    """Make sure that all ranks have the same state of an optimizer, that it fits and is complete.

    Args:
        ranks: the ranks that load.
        call: the call on this rank.
        state_dict: the whole state, with integers as keys.
        inspect_here: raises if it does not fit this rank; returns the parameters that are stepped here.
        is_same: False if ranks have states of different parameters.

    Raises:
        ResumeRefusedError: on all ranks.
    """
    without: list[str] = []

    def digests_here() -> tuple[Digests | None, None]:
        live = {key: f"parameter {key}" for key in inspect_here()}
        without.extend(names_without_state(state_dict["param_groups"], state_dict["state"], live))
        return digests(state_dict) if is_same else None, None

    same_digests(ranks, call, {}, digests_here, OPTIMIZER_UNCHANGED)
    warn_of_missing_states(ranks, without)


def load_model(ranks: Ranks, model: Any, entries: dict[str, Any], strict: bool, *, is_sharded: bool) -> None:
    """Load a whole state dict, after all ranks have checked that it fits all stages together.

    PyTorch checks it, stage by stage: a stage's missing keys are missing, and a key is unexpected if it is to all.
    Sharded files lack the extra state of modules below the model (`_model_sharder`, 0.5.0,
    checkpoint_io/hybrid_parallel_checkpoint_io.py), so that it may be missing there.

    Raises:
        StateDictMismatchError: on all ranks; nothing is written.
    """
    model._force_wait_all_gather()
    zero = inspect_module(model.unwrap(), ranks)
    offered = OrderedDict(entries)
    vars(offered).update(vars(entries) if hasattr(entries, "__dict__") else {})
    for names in _aliases_across_stages(ranks, model, zero.names):
        given = next((name for name in names if name in entries), None)
        offered.update((name, entries[given]) for name in names if given is not None and name not in entries)
    accepted: list[Accepted] = []

    def inspect_here() -> tuple[Digests, tuple[list[str], list[str]]]:
        accepted.append(accept(zero, offered, strict=False))
        return digests(entries, own=names_of_each_rank(zero, entries)), tuple(accepted[0].answer)

    try:
        inspected = same_digests(ranks, "load_model", {"strict": strict}, inspect_here, _MODEL_UNTOUCHED)
    except ResumeRefusedError as error:
        raise StateDictMismatchError(str(error)) from error
    answers = [answer for _, answer in inspected.values()]
    missing = {name for of_stage, _ in answers for name in of_stage}
    if is_sharded:
        missing = {name for name in missing if not name.endswith("_extra_state")}
    unexpected = set(entries).intersection(*(of_stage for _, of_stage in answers))
    if strict and (problems := [*_problem("Missing", missing), *_problem("Unexpected", unexpected)]):
        raise StateDictMismatchError("; ".join(problems), hint="strict=False loads the rest")
    write(accepted[0])
    model.update_master_params()


def _problem(kind: str, keys: Iterable[str]) -> Iterator[str]:
    if names := sorted(keys):
        quoted = join_some([f'"{name}"' for name in names])
        yield f"{kind} key(s) in state_dict: {quoted}"


def _aliases_across_stages(ranks: Ranks, model: Any, names: Mapping[nn.Parameter, list[str]]) -> list[set[str]]:
    """Return the names of each parameter that several stages hold (``shared_params``)."""
    if not hasattr(model, "stage_manager"):
        return []  # LowLevelZeroModel
    stage = model.stage_manager.stage if model.stage_manager is not None else None
    here = [names.get(shared[stage], []) if stage in shared else [] for shared in model.shared_params]
    return [{name for some in of_all for name in some} for of_all in zip(*ranks.gather(here), strict=True)]
