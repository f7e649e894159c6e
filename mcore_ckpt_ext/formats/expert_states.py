"""Extra states of experts: one per expert in model space, one per rank in a grouped linear.

A grouped linear has one for all experts of a rank.

Source: `TEGroupedLinear._split_extra_state` and `merge_extra_states`
(megatron/core/extensions/transformer_engine.py, core_v0.12.1 to 0.19.2). Without fp8, each expert has the common
state. With fp8, the scales and histories of a rank's experts are stored in one array whose last axis is the expert:
`view(3, experts)` and `view(length, 3, experts)` forward, with 2 in place of 3 backward. The recipe and the other
settings are common to all experts, except `num_gemms`, which is the number of experts. This module works on data,
independently of the installed Transformer Engine.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mcore_ckpt_ext.errors import escape, join_some, quantity
from mcore_ckpt_ext.lazy_torch import is_tensor, torch
from mcore_ckpt_ext.model_space.names import EXTRA_STATE, parse
from mcore_ckpt_ext.storage.archive_writer import archive_of
from mcore_ckpt_ext.storage.pickle_allowlist import has_unsafe_pickle
from mcore_ckpt_ext.storage.te_extra_state import UnknownStateError, are_equal, read_state, write_state

_GROUPED = re.compile(rf"^(.*\.experts|experts)\.(linear_fc[12]\.{EXTRA_STATE})$")
_SIDE_BY_SIDE = re.compile(r"^(scale|scale_inv|amax_history)_(fwd|bwd)$")
_SETTINGS = "extra_fp8_variables"
_COUNT = "num_gemms"
_ABOUT = "written empty, because one stored state covers several experts (fp8 scaling is reinitialized)"

StatesAndNotes = tuple[dict[str, Any], list[str]]
"""States by model-space name, and messages."""


def grouped_experts(name: str, numbers: Sequence[int]) -> list[str]:
    """Return the names of the experts whose extra states a grouped linear stores as one.

    Args:
        name: a model-space name without the number of the expert.
        numbers: the numbers of the rank's experts.

    Returns:
        Empty if the name is not that of a grouped linear.
    """
    parsed = parse(name)
    grouped = _GROUPED.match(parsed.rest) if parsed.experts is None else None
    if grouped is None:
        return []
    return [str(replace(parsed, experts=grouped[1], expert=number, rest=grouped[2])) for number in numbers]


def states_of_experts(states: Mapping[str, Any], experts: int) -> StatesAndNotes:
    """Assign an empty state to every expert of grouped linears whose state could not be split."""
    assigned: dict[str, Any] = {}
    emptied: list[str] = []
    for name, state in states.items():
        names = grouped_experts(name, range(experts))
        emptied += [name] if names else []
        assigned |= dict.fromkeys(names or [name], emptied_state(state) if names else state)
    return assigned, about_emptied(emptied)


def split_state(state: Any, experts: int) -> list[Any]:
    """Split the common state of several experts into one state for each.

    Raises:
        UnknownStateError: the state has another structure, or belongs to another number of experts.
    """
    content = _read(state)
    if content is None:
        return [state] * experts
    settings = content.get(_SETTINGS)
    if not isinstance(settings, dict) or settings.get(_COUNT) != experts:
        raise UnknownStateError(f"not the state of {quantity(experts, 'expert')}")
    each = [{**content, _SETTINGS: {**settings, _COUNT: 1}} for _ in range(experts)]
    for name, values in _side_by_side(content):
        if values.dim() == 0 or values.shape[-1] % experts:
            raise UnknownStateError(f"{name} of shape {tuple(values.shape)} for {quantity(experts, 'expert')}")
        for number, expert_content in enumerate(each):
            expert_content[name] = values.reshape(*values.shape[:-1], -1, experts)[..., number].contiguous()
    return [write_state(expert_content, isinstance(state, io.BytesIO)) for expert_content in each]


def joined_state(states: Sequence[Any]) -> Any:
    """Join the states of several experts; settings other than the recipe are taken from the first.

    Raises:
        UnknownStateError: a state has another structure, or the recipes differ.
    """
    contents = [content for state in states if (content := _read(state)) is not None]
    if not contents:
        return states[0]
    first = contents[0]
    settings = contents[0].get(_SETTINGS)
    if len(contents) < len(states) or not isinstance(settings, dict):
        raise UnknownStateError("states of some experts, and none of others")
    whole = {**first, _SETTINGS: {**settings, _COUNT: len(states)}}
    for name, values in _side_by_side(first):
        parts = [content.get(name, torch.empty(0)) for content in contents]
        if any(part.shape != values.shape or part.dtype != values.dtype for part in parts):
            raise UnknownStateError(f"experts whose {name} are of different shapes")
        whole[name] = torch.stack(parts, -1).flatten(-2)
    if any(not are_equal(first.get("recipe"), content.get("recipe")) for content in contents):
        raise UnknownStateError("experts of different fp8 recipes")
    return write_state(whole, isinstance(states[0], io.BytesIO))


def carried_state(state: Any) -> Any:
    """Rewrite a state so that another job can load it, with the same values.

    Raises:
        UnknownStateError: the state contains anything but data and recipes of Transformer Engine.
    """
    content = content_of(state)
    if content is None or not has_unsafe_pickle(content):
        return state
    return _rewritten(content, isinstance(state, io.BytesIO))


@lru_cache(maxsize=64)
def _rewritten(content: bytes, stream: bool) -> Any:
    """Rewrite the bytes of a state; cached, because without scales the states of all modules are equal."""
    state = read_state(content)
    return emptied_state(io.BytesIO() if stream else None) if state is None else write_state(state, stream)


def scaling_of(state: Any) -> dict[str, torch.Tensor]:
    """Return the scales and histories in a state, by name.

    Raises:
        UnknownStateError: the state contains anything but data and recipes of Transformer Engine.
    """
    return dict(_side_by_side(_read(state) or {}))


def _read(state: Any) -> dict[str, Any] | None:
    content = content_of(state)
    return read_state(content) if content else None


def _side_by_side(content: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((k, v) for k, v in list(content.items()) if _SIDE_BY_SIDE.match(k) and is_tensor(v))


def about_emptied(emptied: Sequence[str]) -> list[str]:
    """Report states that could be neither split nor joined."""
    if not emptied:
        return []
    return [f"extra states of {quantity(len(emptied), 'module')} are {_ABOUT}: {join_some([*map(escape, emptied)], 1)}"]


def content_of(state: Any) -> bytes | None:
    """Return the bytes that Transformer Engine unpickles, from a stream or byte tensor; else None."""
    if isinstance(state, io.BytesIO):
        return state.getvalue()
    if is_tensor(state):
        return state.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return bytes(state) if isinstance(state, (bytes, bytearray)) else None


def emptied_state(state: Any) -> Any:
    """Return an empty extra state of the same type."""
    if not isinstance(state, io.BytesIO):
        return torch.empty(0, dtype=torch.uint8)
    return io.BytesIO(archive_of(None))
