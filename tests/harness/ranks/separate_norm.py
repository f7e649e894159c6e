"""Plugin: the local spec names the norm before experts as the Transformer Engine spec does, `pre_mlp_layernorm`.

Otherwise the local spec stores that norm under the key of a fused one, so that even stock Megatron cannot load the
weights of one spec into a model of the other.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt import GPTModel


def install() -> None:
    """Wrap building the model."""
    original = GPTModel.__init__

    @functools.wraps(original)
    def initialize(self: Any, *positional: Any, **keywords: Any) -> None:
        original(self, *positional, **keywords)
        for layer in self.decoder.layers:
            if hasattr(layer.mlp, "router"):
                names = dict(layer.submodules_config.sharded_state_dict_keys_map)
                del names["pre_mlp_layernorm."]
                layer.submodules_config = replace(layer.submodules_config, sharded_state_dict_keys_map=names)

    GPTModel.__init__ = initialize


install()
