"""Test the two forms of sharded keys: layers stacked, and a key for each layer."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.formats.stacking import stacked_blocks
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.model_space.layer_stacks import LayerStacks, split_key


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("decoder.layers.mlp.linear_fc1.weight", ("decoder.layers.", None, "mlp.linear_fc1.weight")),
        ("decoder.layers.12.mlp.linear_fc1.weight", ("decoder.layers.", 12, "mlp.linear_fc1.weight")),
        (
            "chained_0.optimizer.state.exp_avg.decoder.layers.1.b",
            ("chained_0.optimizer.state.exp_avg.decoder.layers.", 1, "b"),
        ),
        ("mtp.layers.0.mtp_model_layer.layers.1.weight", ("mtp.layers.", 0, "mtp_model_layer.layers.1.weight")),
    ],
)
def test_keys_are_split_at_the_outer_layers(key: str, parts: tuple[str, int | None, str]) -> None:
    found = split_key(key)
    assert found == parts
    assert str(found) == key


def test_parameters_outside_layers_have_no_layer() -> None:
    assert split_key("embedding.word_embeddings.weight") is None


def test_blocks_of_both_forms_are_unknown() -> None:
    stacks = LayerStacks.from_shapes(
        {
            "decoder.layers.a": (4, 8),
            "decoder.layers.b": (4, 8, 8),
            "encoder.layers.0.a": (8,),
            "encoder.layers.1.a": (8,),
            "vision.layers.a": (2, 8),
            "vision.layers.0.b": (8,),
            "other.layers.a": (2, 8),
            "other.layers.b": (3, 8),
            "output_layer.weight": (8, 8),
        }
    )
    assert stacks.layers == {"decoder.layers.": 4, "encoder.layers.": 0}


@pytest.mark.parametrize(
    ("suffix", "arguments", "stacked"),
    [
        ("self_attention.linear_qkv.weight", {}, {"decoder"}),
        ("self_attention.linear_qkv.weight", {"moe_layer_freq": [1, 1]}, set()),
        ("self_attention.linear_qkv.weight", {"moe_layer_freq": 1}, {"decoder"}),
        ("self_attention.linear_qkv.weight", {"hybrid_layer_pattern": "**"}, set()),
        ("mixer.norm.weight", {}, set()),
    ],
)
def test_hybrid_models_are_never_stacked(suffix: str, arguments: dict[str, object], stacked: set[str]) -> None:
    names = [f"decoder.layers.{layer}.{suffix}" for layer in range(2)]
    assert stacked_blocks(names, JobArguments.of(arguments)) == stacked
