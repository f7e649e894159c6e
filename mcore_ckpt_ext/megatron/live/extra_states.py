"""Selects the extra states that a live model chunk needs from those of a checkpoint of any layout.

A `state_dict` has an extra state for each module of Transformer Engine, next to its parameters. The parameters show
which module it is in the whole model, and which experts a grouped linear has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.formats.expert_states import carried_state, joined_state
from mcore_ckpt_ext.megatron.live.model import LiveParameter
from mcore_ckpt_ext.model_space.names import EXTRA_STATE, is_extra_state
from mcore_ckpt_ext.storage.te_extra_state import UnknownStateError

_WEIGHT = re.compile(r"^(.*)\.weight(\d*)$")


@dataclass(frozen=True)
class FoundStates:
    """The extra states for one chunk.

    Attributes:
        states: the states by their names in the chunk's own `state_dict`.
        missing: modules without a state in the checkpoint, such as those written under the local spec.
        unknown: modules whose states are of an unknown kind.
    """

    states: Mapping[str, Any]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]


def states_for(own: Mapping[str, Any], live: Mapping[str, LiveParameter], stored: Mapping[str, Any]) -> FoundStates:
    """Return the states of a chunk's modules.

    Args:
        own: the chunk's `state_dict`.
        live: its parameters, by their names in `own`.
        stored: the checkpoint's states, by model-space name.
    """
    weights: dict[str, dict[int, str]] = {}
    for name, parameter in live.items():
        if match := _WEIGHT.match(name):
            weights.setdefault(match[1], {})[int(match[2] or 0)] = parameter.regions[0].name
    states: dict[str, Any] = {}
    missing = []
    unknown = []
    for name, value in own.items():
        module = name.removesuffix(f".{EXTRA_STATE}")
        if not is_extra_state(name) or value is None or module not in weights:
            continue
        in_model = [weight.rpartition(".")[0] for _, weight in sorted(weights[module].items())]
        stored_states = [stored.get(f"{prefix}.{EXTRA_STATE}") for prefix in in_model]
        if any(state is None for state in stored_states):
            missing.append(name)
            continue
        try:
            states[name] = carried_state(stored_states[0]) if len(stored_states) == 1 else joined_state(stored_states)
        except UnknownStateError:
            unknown.append(name)
    return FoundStates(states, tuple(missing), tuple(unknown))
