"""Test names and slices of model space."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.model_space.names import name_at, stacked_axes
from mcore_ckpt_ext.model_space.slices import Region, Slice


@pytest.mark.parametrize(
    ("key", "index", "name"),
    [
        ("embedding.word_embeddings.weight", (), "embedding.word_embeddings.weight"),
        ("decoder.layers.mlp.linear_fc1.weight", (3,), "decoder.layers.3.mlp.linear_fc1.weight"),
        ("decoder.layers.3.mlp.linear_fc1.weight", (), "decoder.layers.3.mlp.linear_fc1.weight"),
        (
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            (3, 5),
            "decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight",
        ),
        (
            "decoder.layers.3.mlp.experts.experts.linear_fc1.weight",
            (5,),
            "decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight",
        ),
    ],
)
def test_layer_and_expert_axes_become_part_of_the_name(key: str, index: tuple[int, ...], name: str) -> None:
    assert stacked_axes(key) == len(index)
    assert name_at(key, index) == name


def test_a_slice_is_cut_at_its_regions() -> None:
    gate, up = Region("fc1", (2, 0), (2, 5)), Region("fc1", (6, 0), (2, 5))
    assert list(Slice((gate, up), 7, 13).pieces()) == [(gate, 7, 10, 0), (up, 0, 3, 3)]
    assert Slice.whole((gate, up)).numel == 20
