"""Sharded keys: how Megatron stacks layers and experts of model space into arrays, and back.

Source: `TransformerBlock.sharded_state_dict` (megatron/core/transformer/transformer_block.py, core_v0.7.0 to 0.19.2):
homogeneous blocks stack their layers into one array a parameter, heterogeneous ones name each layer in the key.
Experts are stacked always (`sharded_state_dict` of moe/experts.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_LAYER = re.compile(r"^(?P<before>decoder\.layers\.)(?P<index>\d+)\.(?P<after>.+)$")
_EXPERT = re.compile(r"^(?P<before>.*\.experts\.experts\.)(?P<index>\d+)\.(?P<after>.+)$")

# Arguments whose value other than the default makes a block heterogeneous.
_ALWAYS = (
    "hetereogenous_dist_checkpoint", "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json",
)  # fmt: skip
_FREQUENCIES = ("moe_layer_freq", "linear_attention_freq")

ShardedKey = tuple[str, tuple[int, ...]]


def sharded_key(name: str, stack_layers: bool) -> ShardedKey:
    """The sharded key of a model-space name, and its index on the stacked axes: the inverse of `name_at`."""
    index: list[int] = []
    for pattern in (_LAYER, _EXPERT) if stack_layers else (_EXPERT,):
        if match := pattern.match(name):
            name = match["before"] + match["after"]
            index.append(int(match["index"]))
    return name, tuple(index)


def stacks_layers(names: Iterable[str], arguments: Mapping[str, Any]) -> bool:
    """Whether Megatron stacks the layers of a model with these parameters."""
    if any(arguments.get(name) for name in _ALWAYS):
        return False
    frequencies = [arguments.get(name) for name in _FREQUENCIES]
    if any(isinstance(value, list) or (isinstance(value, int) and value > 1) for value in frequencies):
        return False
    by_layer: dict[str, set[str]] = {}
    for name in names:
        if match := _LAYER.match(name):
            by_layer.setdefault(match["index"], set()).add(match["after"])
    return len({frozenset(suffixes) for suffixes in by_layer.values()}) <= 1
