"""Extra states of experts: one for each of them in model space, one for all of a rank's in a grouped linear.

Source: `TEGroupedLinear._split_extra_state` and `merge_extra_states`
(megatron/core/extensions/transformer_engine.py, core_v0.12.1 to 0.19.2). Without fp8 each expert has the state of all.
With fp8, scales and histories of a rank's experts lie side by side, the expert last: `view(3, experts)` and
`view(length, 3, experts)` forwards, of two places backwards. The recipe and the other settings are those of all, but
for `num_gemms`, which counts the experts. Here that is done on data, whatever Transformer Engine is installed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mcore_ckpt_ext.errors import escape
from mcore_ckpt_ext.lazy_torch import is_tensor, torch
from mcore_ckpt_ext.model_space.names import EXTRA_STATE, parse
from mcore_ckpt_ext.storage.pickle_allowlist import hides_a_pickle
from mcore_ckpt_ext.storage.te_extra_state import UnknownStateError, archive_of, read_state, same, write_state

_GROUPED = re.compile(rf"^(.*\.experts|experts)\.(linear_fc[12]\.{EXTRA_STATE})$")
_SIDE_BY_SIDE = re.compile(r"^(scale|scale_inv|amax_history)_(fwd|bwd)$")
_SETTINGS, _COUNT = "extra_fp8_variables", "num_gemms"
_ABOUT = "written empty, because one stored state covers several experts (fp8 scaling is reinitialized)"

FoundLayout = tuple[dict[str, Any], list[str]]
"""States by model-space name, and notes."""


def grouped_experts(name: str, numbers: Sequence[int]) -> list[str]:
    """The names of the experts whose states a grouped linear has as one; none where it is no such linear's name.

    Args:
        name: a model-space name, but for the expert's number.
        numbers: those of the rank's experts.
    """
    parsed = parse(name)
    grouped = _GROUPED.match(parsed.rest) if parsed.experts is None else None
    if grouped is None:
        return []
    return [str(replace(parsed, experts=grouped[1], expert=number, rest=grouped[2])) for number in numbers]


def of_each_expert(states: Mapping[str, Any], experts: int) -> FoundLayout:
    """States of grouped linears that could not be split, emptied, under the names of the experts of the model."""
    found: dict[str, Any] = {}
    emptied: list[str] = []
    for name, state in states.items():
        names = grouped_experts(name, range(experts))
        emptied += [name] if names else []
        found |= dict.fromkeys(names or [name], emptied_state(state) if names else state)
    return found, about_emptied(emptied)


def split_state(state: Any, experts: int) -> list[Any]:
    """The state of each of several experts, from one for all of them.

    Raises:
        UnknownStateError: it is not such a state.
    """
    content = _read(state)
    if content is None:
        return [state] * experts
    settings = content.get(_SETTINGS)
    if not isinstance(settings, dict) or settings.get(_COUNT) != experts:
        raise UnknownStateError(f"not the state of {experts} experts")
    each = [{**content, _SETTINGS: {**settings, _COUNT: 1}} for _ in range(experts)]
    for name, values in _side_by_side(content):
        if values.dim() == 0 or values.shape[-1] % experts:
            raise UnknownStateError(f"{name} of shape {tuple(values.shape)} for {experts} experts")
        for number, own in enumerate(each):
            own[name] = values.reshape(*values.shape[:-1], -1, experts)[..., number].contiguous()
    return [write_state(own, isinstance(state, io.BytesIO)) for own in each]


def joined_state(states: Sequence[Any]) -> Any:
    """One state for several experts, from the state of each; settings beside the recipe are those of the first.

    Raises:
        UnknownStateError: they are not such states, or of different recipes.
    """
    contents = [content for state in states if (content := _read(state)) is not None]
    if not contents:
        return states[0]
    first, settings = contents[0], contents[0].get(_SETTINGS)
    if len(contents) < len(states) or not isinstance(settings, dict):
        raise UnknownStateError("states of some experts, and none of others")
    whole = {**first, _SETTINGS: {**settings, _COUNT: len(states)}}
    for name, values in _side_by_side(first):
        parts = [content.get(name, torch.empty(0)) for content in contents]
        if any(part.shape != values.shape or part.dtype != values.dtype for part in parts):
            raise UnknownStateError(f"experts whose {name} are of different shapes")
        whole[name] = torch.stack(parts, -1).flatten(-2)
    if any(not same(first.get("recipe"), content.get("recipe")) for content in contents):
        raise UnknownStateError("experts of different fp8 recipes")
    return write_state(whole, isinstance(states[0], io.BytesIO))


def carried_state(state: Any) -> Any:
    """A state that another job may load, with the numbers that it has.

    Raises:
        UnknownStateError: it holds something else than data and recipes of Transformer Engine.
    """
    content = content_of(state)
    if content is None or not hides_a_pickle(content):
        return state
    return _rewritten(content, isinstance(state, io.BytesIO))


@lru_cache(maxsize=64)
def _rewritten(content: bytes, stream: bool) -> Any:
    """Remembered, because without scales the states of all modules are the same."""
    found = read_state(content)
    return emptied_state(io.BytesIO() if stream else None) if found is None else write_state(found, stream)


def scaling_of(state: Any) -> dict[str, torch.Tensor]:
    """The scales and histories in a state, by their names in it.

    Raises:
        UnknownStateError: it holds something else than data and recipes of Transformer Engine.
    """
    return dict(_side_by_side(_read(state) or {}))


def _read(state: Any) -> dict[str, Any] | None:
    content = content_of(state)
    return read_state(content) if content else None


def _side_by_side(content: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((k, v) for k, v in list(content.items()) if _SIDE_BY_SIDE.match(k) and is_tensor(v))


def about_emptied(emptied: Sequence[str]) -> list[str]:
    """What is to be said of states that could be neither split nor joined."""
    return [f"extra states of {len(emptied)} modules are {_ABOUT}: {escape(emptied[0])} and so on"] if emptied else []


def content_of(state: Any) -> bytes | None:
    """The bytes that Transformer Engine unpickles: a stream, or a tensor of bytes."""
    if isinstance(state, io.BytesIO):
        return state.getvalue()
    if is_tensor(state):
        return state.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return bytes(state) if isinstance(state, (bytes, bytearray)) else None


def emptied_state(state: Any) -> Any:
    """An extra state of the same type that says nothing."""
    if not isinstance(state, io.BytesIO):
        return torch.empty(0, dtype=torch.uint8)
    return io.BytesIO(archive_of(None))
