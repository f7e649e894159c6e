"""Logical tensors and their names.

A logical tensor is one parameter-shaped global array, identified by `(kind, name)`. Names are Megatron's
sharded keys with the global layer and expert index inserted, so that a name never depends on how a
format stacks layers or experts into one array.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

WEIGHT = "weight"
FP32_PARAM = "fp32_param"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"

# `decoder.layers.self_attention...`: the first axis of the stored array counts layers. A digit after
# `layers.` means that the key already names its layer (transformer_block.py, `sharded_state_dict`,
# core_v0.16.1: homogeneous blocks prepend a layer axis, heterogeneous blocks put the index into the key).
_STACKED_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")
# `mlp.experts.experts.linear_fc1.weight`: the next axis counts experts (moe/experts.py, `sharded_state_dict`).
_STACKED_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d)")


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A global array of model space: its name, its shape in elements, its torch dtype by name (`bfloat16`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def stacked_axes(key: str) -> int:
    """How many leading axes of the array stored under Megatron's sharded `key` count layers and experts."""
    return bool(_STACKED_LAYERS.search(key)) + bool(_STACKED_EXPERTS.search(key))


def name_at(key: str, stack_index: Sequence[int]) -> str:
    """The model-space name of one element of a stacked array.

    Args:
        key: Megatron's sharded key.
        stack_index: index on each of the `stacked_axes(key)` leading axes.
    """
    index = list(stack_index)
    name = key
    for pattern in (_STACKED_LAYERS, _STACKED_EXPERTS):
        if match := pattern.search(name):
            name = f"{name[: match.end()]}{index.pop(0)}.{name[match.end() :]}"
    return name
