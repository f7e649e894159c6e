"""Test the translation of Megatron's own requests to the form in which a checkpoint stores its layers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from mcore_ckpt_ext.megatron.stored_layers import with_stored_layer
from mcore_ckpt_ext.model_space.layer_stacks import LayerStacks

LAYER, LAYERS = 2, 4
STACKED, LISTED = LayerStacks({"decoder.layers.": LAYERS}), LayerStacks({"decoder.layers.": 0})
KEYS = {
    "dense": "self_attention.linear_qkv.weight",
    "experts": "mlp.experts.experts.linear_fc1.weight",
}


def tensor(key: str, *offsets: tuple[int, int, int]) -> ShardedTensor:
    """Request half of the rows of a tensor, with the axes in front of it that its key does not name."""
    axes = len(offsets)
    return ShardedTensor.from_rank_offsets(key, torch.empty(2, 3), *offsets, (axes, 1, 2), prepend_axis_num=axes)


def state(key: str, *offsets: tuple[int, int]) -> ShardedObject:
    places, sizes = zip(*offsets or [(0, 1)], strict=True)
    return ShardedObject(key, b"state", sizes, places)


def fields_of(entry: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(entry).items() if name != "data"}


@pytest.mark.parametrize(("kind", "experts"), [("dense", []), ("experts", [(1, 8)])])
def test_a_request_becomes_what_the_other_model_requests(kind: str, experts: list[tuple[int, int]]) -> None:
    """`TransformerBlock.sharded_state_dict` gives the offset of the layer, or puts its number into the key."""
    key = KEYS[kind]
    listed_key, stacked_key = f"decoder.layers.{LAYER}.{key}", f"decoder.layers.{key}"
    stacked_offsets = [(LAYER, LAYERS), *experts]
    pairs = [
        (
            tensor(listed_key, *((axis, *place) for axis, place in enumerate(experts))),
            tensor(stacked_key, *((axis, *place) for axis, place in enumerate(stacked_offsets))),
        ),
        (state(listed_key, *experts), state(stacked_key, *stacked_offsets)),
    ]
    for listed, stacked in pairs:
        assert fields_of(with_stored_layer(listed, STACKED)) == fields_of(stacked)
        assert fields_of(with_stored_layer(stacked, LISTED)) == fields_of(listed)
        assert with_stored_layer(stacked, STACKED) is stacked
        assert with_stored_layer(listed, LISTED) is listed
        assert with_stored_layer(listed, LayerStacks({})) is listed


def test_a_layer_that_is_not_stored_keeps_its_key() -> None:
    request = tensor(f"decoder.layers.{LAYERS}.{KEYS['dense']}")
    assert with_stored_layer(request, STACKED) is request
