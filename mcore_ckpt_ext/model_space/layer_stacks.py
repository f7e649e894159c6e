"""Translates sharded keys between the two forms in which Megatron stores the layers of a block.

A homogeneous block stacks its layers into one array for each parameter, any other block has the layer's number in each
key, and arguments alone decide which it is: `--moe-layer-freq ([1]*48)` describes the same model as the default, but
has other keys (`TransformerBlock.sharded_state_dict`, megatron/core/transformer/transformer_block.py, core_v0.7.0 to
0.19.2 and the development head: `moe_layer_freq`, `linear_attention_freq`, `hetereogenous_dist_checkpoint`,
`heterogeneous_block_specs`, and `non_homogeneous_layers` or `singleton_local_shards` of a program's metadata).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# The first module with layers; of nested ones (multi-token prediction), the outer one has a number in every release.
_LAYERS = re.compile(r"^(?P<block>(?:.*?\.)?layers\.)(?:(?P<layer>\d+)\.)?(?P<rest>.+)$")


class LayerKey(NamedTuple):
    """A sharded key: up to `layers.`, the number of the layer if the key has one, and the rest."""

    block: str
    layer: int | None
    rest: str

    def __str__(self) -> str:
        return self.block + ("" if self.layer is None else f"{self.layer}.") + self.rest


def split_key(key: str) -> LayerKey | None:
    """Split a sharded key; None if it belongs to no layer."""
    match = _LAYERS.match(key)
    return match and LayerKey(match["block"], None if match["layer"] is None else int(match["layer"]), match["rest"])


@dataclass(frozen=True)
class LayerStacks:
    """The form in which a checkpoint stores the layers of each block.

    Attributes:
        layers: the number of stacked layers by block, as in `LayerKey`; 0 if each layer has keys of its own.
    """

    layers: Mapping[str, int]

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]]) -> LayerStacks:
        """Return the form of each block whose arrays, given by key with their shapes, all have the same one."""
        forms: dict[str, set[int]] = {}
        for key, shape in shapes.items():
            parts = split_key(key)
            if parts is not None and (parts.layer is not None or shape):
                forms.setdefault(parts.block, set()).add(shape[0] if parts.layer is None else 0)
        return cls({block: sizes.pop() for block, sizes in forms.items() if len(sizes) == 1})
