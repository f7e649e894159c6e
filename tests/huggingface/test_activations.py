"""Tests GELU, exact or approximated by tanh, and the names of SiLU."""

from __future__ import annotations

import json

import pytest

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.bridge import run_config
from mcore_ckpt_ext.families.recognition import family_named
from mcore_ckpt_ext.job.loops.bridge import job_arguments
from mcore_ckpt_ext.job.model_arguments import complete
from tests.harness.huggingface import CONFIGS

KEYS = {"gpt2": "activation_function", "starcoder2": "hidden_act", "gemma2": "hidden_activation"}
KEYS |= {"gemma3": KEYS["gemma2"]}


@pytest.mark.parametrize(("name", "key"), KEYS.items())
def test_each_function_is_expressed(name: str, key: str) -> None:
    family, config = family_named(CONFIGS[name]().model_type), CONFIGS[name]().to_dict()
    assert family.arguments(config).bias_gelu_fusion
    exact = family.arguments({**config, key: "gelu"})
    assert not exact.bias_gelu_fusion
    assert family.config(exact)[key] == "gelu"
    assert family.mismatches(exact) == []
    with pytest.raises(UnsupportedCheckpointError, match=key):
        family.arguments({**config, key: "relu"})


def test_swish_is_silu() -> None:
    family, config = family_named("llama"), CONFIGS["llama"]().to_dict()
    assert family.arguments({**config, "hidden_act": "swish"}) == family.arguments(config)
    with pytest.raises(UnsupportedCheckpointError, match="hidden_act"):
        family.arguments({**config, "hidden_act": "gelu"})


@pytest.mark.parametrize("function", ["gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_megatron_bridge_is_given_the_function(name: str, function: str) -> None:
    """The provider's default is the approximation; another function in the file is used as it is."""
    family = family_named(CONFIGS[name]().model_type)
    arguments = family.arguments({**CONFIGS[name]().to_dict(), "hidden_activation": function})
    content = json.loads(run_config(family, arguments))
    target = content["model"].get("activation_func", {}).get("_target_")
    assert target == ("torch.nn.functional.gelu" if function == "gelu" else None)
    found = complete(job_arguments(content, "run_config.yaml"))
    assert family.config(found)["hidden_activation"] == function
