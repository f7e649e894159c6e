"""Plugin: training of a part of the model. The position embeddings and a layer are frozen when built."""

from __future__ import annotations

import functools
import os
from typing import Any

from megatron.core.models.gpt import GPTModel

FROZEN_LAYER = int(os.environ.get("TEST_FROZEN_LAYER", "2"))  # counted from one over the whole model


def install() -> None:
    """Wrap building the model, so that it is frozen before it is wrapped for data parallelism."""
    original = GPTModel.__init__

    @functools.wraps(original)
    def initialize(self: Any, *positional: Any, **keywords: Any) -> None:
        original(self, *positional, **keywords)
        frozen = [layer for layer in self.decoder.layers if layer.layer_number == FROZEN_LAYER]
        if self.pre_process:
            frozen.append(self.embedding.position_embeddings)
        for module in frozen:
            module.requires_grad_(False)

    GPTModel.__init__ = initialize


install()
