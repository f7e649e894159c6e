"""Refuses optimizer checkpoints that have lost states: neither the index nor the folder has them.

Parameters may have no state: they were frozen, never received a gradient (0.5.0, zero/low_level/low_level_optim.py:
``step``), or the optimizer keeps none. So a save notes their numbers in its first param group.

Stock ColossalAI loads this note, and all masters and padding rows, trains on, and saves them again as they were (0.5.0,
zero/gemini/gemini_optimizer.py: ``load_param_groups``, ``load_single_param_states``; checkpoint_io/
hybrid_parallel_checkpoint_io.py: ``load_sharded_optimizer``). So the note has the newest step, too, which is lower
than that of the states if it is outdated. SGD counts no steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mcore_ckpt_ext.colossalai.ranks import Ranks
from mcore_ckpt_ext.errors import ModelMismatchError, join_some, quantity

OURS = "mcore_ckpt_ext"
"""The entry of the first param group with what ColossalAI does not save."""
MASTER = "fp32_param"
PADDING = "_padding"
"""Suffix of the padding rows of a state: ``exp_avg_padding``. Asynchronous files allow no dot there."""
_STATELESS = "stateless"
_STEP = "step"


def stateless_note(numbers: Iterable[int], with_state: Iterable[int], step: float) -> dict[str, Any]:
    """Return the note of the first param group: the parameters that have no state, and the newest step."""
    return {_STATELESS: sorted(set(numbers).difference(with_state)), _STEP: step}


def newest_step(states: Iterable[Mapping[str, Any]]) -> float:
    """Return the highest step of some states; 0.0 if they count none."""
    steps = (torch.as_tensor(state[_STEP], dtype=torch.float32) for state in states if _STEP in state)
    return max((float(step.max()) for step in steps), default=0.0)


def drop_outdated(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict without the note, masters and padding rows if stock has trained since.

    The parameters' names remain: stock finds parameters by their numbers.
    """
    groups: list[dict[str, Any]] = state_dict.get("param_groups") or [{}]
    states = state_dict.get("state", {})
    note = groups[0].get(OURS, {})
    # Lost states may have been the newest: older ones than the note's are no reason to drop it.
    if _STEP not in note or newest_step(filter(None, states.values())) <= note[_STEP]:
        return state_dict
    names = {key: value for key, value in note.items() if key == "names"}
    current = {
        number: {kind: value for kind, value in state.items() if kind != MASTER and not kind.endswith(PADDING)}
        for number, state in states.items()
    }
    return {**state_dict, "param_groups": [{**groups[0], OURS: names}, *groups[1:]], "state": current}


def names_without_state(
    groups: list[dict[str, Any]], states: Mapping[int, Mapping[str, Any]], live: Mapping[int, str]
) -> list[str]:
    """Return the parameters without a state, if a checkpoint with states does not note which have none.

    Args:
        groups: the checkpoint's param groups.
        states: its states, by the parameters' numbers.
        live: the names of parameters that the optimizer steps, by their numbers in the checkpoint.

    Raises:
        ModelMismatchError: the checkpoint lacks states, and notes that they were saved.
    """
    without = {number: name for number, name in live.items() if not states.get(number)}
    stateless = groups[0].get(OURS, {}).get(_STATELESS) if groups else None
    if stateless is None:
        return list(without.values()) if any(states.values()) else []
    saved = {number for group in groups for number in group["params"]}.difference(stateless)
    if lost := [name for number, name in without.items() if number in saved]:
        raise ModelMismatchError(
            "the checkpoint has lost states of the optimizer",
            found=f"no state of {quantity(len(lost), 'parameter')}",
            expected="all states that were saved",
            where=join_some(lost),
            hint="use another copy of the checkpoint; a file of this one is missing, and its index does not name it. "
            "If ColossalAI alone saved it after parameters were frozen, load without this package, then save with it",
        )
    return []


def warn_of_missing_states(ranks: Ranks, names: list[str]) -> None:
    """Log on one of the ranks which parameters begin without a state; all ranks must call this."""
    by_rank = ranks.items_by_rank(names)
    if (missing := list(dict.fromkeys(sum(by_rank.values(), [])))) and ranks.rank == min(by_rank):
        logging.getLogger("mcore_ckpt_ext").warning(
            "the checkpoint has no optimizer state of %s (%s), which begin without: this is right only if they were "
            "frozen or never received a gradient; otherwise a file is missing",
            quantity(len(missing), "parameter"),
            join_some(missing),
        )
