"""Global names of live parameters; the translation shares no code with this package."""

from __future__ import annotations

from typing import Any

from megatron.training import get_args
from megatron_on_cpu import dump_optimizer


def names_of(model: list[Any]) -> dict[int, str]:
    """Return global names by the identities of parameters."""
    tied = not get_args().untie_embeddings_and_output_weights
    names = {}
    for wrapped in model:
        chunk = wrapped
        while hasattr(chunk, "module"):
            chunk = chunk.module
        layers = dump_optimizer.names_of_layers(chunk)
        for name, parameter in chunk.named_parameters():
            names[id(parameter)] = dump_optimizer.name_in_model(name, layers, chunk.config, tied=tied)
    return names
