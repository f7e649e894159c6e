"""Test that errors of a resume name the arguments in which the models differ."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.errors import ModelMismatchError
from mcore_ckpt_ext.job.differences import SAME_MODEL, differing_arguments, naming_differences
from mcore_ckpt_ext.job.job_arguments import JobArguments

SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
WRITTEN = JobArguments.of({**SIZES, "num_query_groups": 4, "qk_layernorm": True, "moe_router_topk": 2, "lr": 1e-3})


def test_only_what_has_an_effect_on_the_model_is_named() -> None:
    running = WRITTEN.replace(num_layers=6, qk_layernorm=False, moe_router_topk=4, num_query_groups=1, lr=2e-3)
    assert differing_arguments(WRITTEN, running) == ["num_layers 4, now 6", "qk_layernorm True, now False"]
    with_experts = WRITTEN.replace(num_experts=8)
    assert differing_arguments(with_experts, with_experts.replace(moe_router_topk=4)) == ["moe_router_topk 2, now 4"]


def test_other_errors_and_equal_models_keep_their_hint() -> None:
    for hint, running in (("another", WRITTEN.replace(num_layers=6)), (SAME_MODEL, WRITTEN)):
        with pytest.raises(ModelMismatchError) as caught, naming_differences(WRITTEN, running):
            raise ModelMismatchError("a parameter", hint=hint)
        assert caught.value.details == {"hint": hint}


def test_biases_of_queries_that_older_releases_did_not_record_are_no_difference() -> None:
    """Megatron 0.8 has them without saying so, where all linears have biases."""
    written, running = (WRITTEN.replace(add_bias_linear=True, add_qkv_bias=stated) for stated in (False, True))
    assert differing_arguments(written, running) == []
    without = [job.replace(add_bias_linear=False) for job in (written, running)]
    assert differing_arguments(*without) == ["add_qkv_bias False, now True"]


def test_layers_with_experts_are_compared_in_either_form() -> None:
    written = WRITTEN.replace(num_experts=4, moe_layer_freq=2)
    assert differing_arguments(written, written.replace(moe_layer_freq=[1, 0, 1, 0])) == []
    (difference,) = differing_arguments(written, written.replace(moe_layer_freq=[0, 1, 0, 1]))
    assert difference.startswith("moe_layer_freq")
