"""Tests layers that reuse the tokens of an earlier layer's indexer."""

from __future__ import annotations

import pytest
from transformers import GlmMoeDsaConfig

from mcore_ckpt_ext.families.recognition import family_named
from mcore_ckpt_ext.job.model_arguments import ModelArguments
from tests.harness.huggingface import CONFIGS

FAMILY = family_named("glm_moe_dsa")


def arguments_for(pattern: str) -> ModelArguments:
    config = CONFIGS["glm_moe_dsa"]().to_dict()
    layers = {"num_hidden_layers": len(pattern), "indexer_types": None, "mlp_layer_types": None, "layer_types": None}
    return FAMILY.arguments({**config, **layers, "index_topk_pattern": pattern})


@pytest.mark.parametrize(
    ("pattern", "frequency", "offset"),
    [("FFFF", 1, 0), ("FSFS", 2, 1), ("FFFSSSFSSSF", 4, 3), ("FFSSS", 4, 2), ("FSSSS", 5, 1)],
)
def test_a_pattern_is_a_frequency_and_an_offset(pattern: str, frequency: int, offset: int) -> None:
    """The transformers class derives the same pattern from the written keys."""
    arguments = arguments_for(pattern)
    found = (arguments.dsa_indexer_topk_freq, arguments.dsa_indexer_skip_topk_offset)
    assert found == (frequency, offset)
    config = FAMILY.config(arguments)
    listed = config.pop("indexer_types", None)
    assert GlmMoeDsaConfig(**config).indexer_types == [{"F": "full", "S": "shared"}[kind] for kind in pattern]
    assert listed in (None, GlmMoeDsaConfig(**config).indexer_types)


def test_a_frequency_without_an_offset() -> None:
    """Without an offset, transformers begins with layer 2."""
    config = {**CONFIGS["glm_moe_dsa"]().to_dict(), "indexer_types": None, "index_topk_freq": 2}
    assert FAMILY.arguments(config).dsa_indexer_skip_topk_offset == 2


def test_only_layers_with_an_indexer_have_its_tensors() -> None:
    arguments = arguments_for("FSF").replace(mtp_num_layers=1)
    names = {tensor.name for tensor in FAMILY.tensors(arguments)}
    found = [f"model.layers.{layer}.self_attn.indexer.wk.weight" in names for layer in range(4)]
    assert found == [True, False, True, True]  # the MTP layer has its own indexer


def test_an_mtp_layer_that_shares_is_refused() -> None:
    arguments = arguments_for("FSF").replace(mtp_num_layers=2)
    assert FAMILY.mismatches(arguments) == ["an MTP layer without its own indexer"]
    assert FAMILY.mismatches(arguments_for("FFSF").replace(mtp_num_layers=2)) == []
