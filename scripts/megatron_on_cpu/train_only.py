"""Trains only some parameters: a plugin of ``launch.run``.

Set ``MEGATRON_ON_CPU_TRAIN_ONLY`` to a part of their names. What the others hide in a norm of all gradients then shows.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

VARIABLE = "MEGATRON_ON_CPU_TRAIN_ONLY"
"""Environment variable with a part of the names of the parameters; it is looked up for each model."""


def install() -> None:
    """Wrap the construction of Megatron's GPT."""
    model: Any = importlib.import_module("megatron.core.models.gpt").GPTModel
    build = model.__init__

    @functools.wraps(build)
    def initialize(self: Any, *positional: Any, **keywords: Any) -> None:
        build(self, *positional, **keywords)
        part = os.environ.get(VARIABLE, "")
        for name, parameter in self.named_parameters():
            parameter.requires_grad = part in name

    model.__init__ = initialize


if __name__ == "<run_path>":  # as a plugin
    install()
