"""Extra states of experts: one for each of them in model space, one for all of a rank's in a grouped linear.

Source: `TEGroupedLinear._split_extra_state` and `merge_extra_states`
(megatron/core/extensions/transformer_engine.py, core_v0.12.1 to 0.19.2): without fp8 each expert has the state of all;
with fp8 it is taken apart, along an axis that only the running recipe tells. That is not done here: where it would be
needed, states are emptied, and whoever reads them begins its fp8 scaling anew.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mcore_ckpt_ext.errors import printable
from mcore_ckpt_ext.model_space.names import EXTRA_STATE, parse
from mcore_ckpt_ext.storage.archive_draft import draft_archive

_GROUPED = re.compile(rf"^(.*\.experts|experts)\.(linear_fc[12]\.{EXTRA_STATE})$")
_ABOUT = "written empty, because one state there stands for several experts (fp8 scaling begins anew)"

Found = tuple[dict[str, Any], list[str]]
"""States by model-space name, and notes."""


def of_each_expert(states: Mapping[str, Any], experts: int) -> Found:
    """States of grouped linears under the names of their experts.

    Args:
        states: extra states by name, as a legacy checkpoint has them.
        experts: how many there are in the model.
    """
    found: dict[str, Any] = {}
    emptied: list[str] = []
    for name, state in states.items():
        parsed = parse(name)
        grouped = _GROUPED.match(parsed.rest) if parsed.experts is None else None
        if grouped is None:
            found[name] = state
            continue
        if content_of(state):
            emptied.append(name)
        each = emptied_state(state) if content_of(state) else state
        for number in range(experts):
            found[str(replace(parsed, experts=grouped[1], expert=number, rest=grouped[2]))] = each
    return found, _notes(emptied)


def of_all_experts(states: Mapping[str, Any]) -> Found:
    """States that a grouped linear can have as one: those of its experts are the same, or they are empty."""
    by_module: dict[str, list[str]] = {}
    for name in states:
        if (parsed := parse(name)).expert is not None:
            by_module.setdefault(parsed.own(grouped_experts=True), []).append(name)
    differing = {
        module: names for module, names in by_module.items() if len({content_of(states[name]) for name in names}) > 1
    }
    empty = {name for names in differing.values() for name in names}
    found = {name: emptied_state(state) if name in empty else state for name, state in states.items()}
    return found, _notes(list(differing))


def _notes(emptied: list[str]) -> list[str]:
    return (
        [f"extra states of {len(emptied)} modules are {_ABOUT}: {printable(emptied[0])} and so on"] if emptied else []
    )


def content_of(state: Any) -> bytes | None:
    """The bytes that Transformer Engine unpickles: a stream, or a tensor of bytes."""
    if isinstance(state, io.BytesIO):
        return state.getvalue()
    if isinstance(state, torch.Tensor):
        return state.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return bytes(state) if isinstance(state, (bytes, bytearray)) else None


def emptied_state(state: Any) -> Any:
    """An extra state of the same type that says nothing."""
    if not isinstance(state, io.BytesIO):
        return torch.empty(0, dtype=torch.uint8)
    content = bytearray(draft_archive(None).length)
    for position, data in draft_archive(None).literals:
        content[position : position + len(data)] = data
    return io.BytesIO(bytes(content))
