"""Plugin: a model whose layers register their parts in another order, as a custom layer spec may."""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.models.gpt import GPTModel

# The modules that each registers first, in this order; the others follow in their own order.
FIRST = {
    "layer": ("mlp", "pre_mlp_layernorm", "self_attention"),
    "mlp": ("linear_fc2", "linear_fc1"),
    "self_attention": ("linear_qkv", "linear_proj"),
}


def reorder(module: Any, first: tuple[str, ...]) -> None:
    """Register a module's submodules in another order."""
    parts = dict(module._modules)
    module._modules.clear()
    module._modules.update({name: parts[name] for name in first} | parts)


def install() -> None:
    """Wrap building the model, so that the order changes before the model is wrapped for data parallelism."""
    original = GPTModel.__init__

    @functools.wraps(original)
    def initialize(self: Any, *positional: Any, **keywords: Any) -> None:
        original(self, *positional, **keywords)
        for layer in self.decoder.layers:
            reorder(layer.mlp, FIRST["mlp"])
            reorder(layer.self_attention, FIRST["self_attention"])
            reorder(layer, FIRST["layer"])

    GPTModel.__init__ = initialize


install()
