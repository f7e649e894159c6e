"""Fills and returns the fp8 scales of Transformer Engine's modules (delayed scaling) without kernels.

The first forward pass initializes the metadata of a module (``init_fp8_metadata``, transformer_engine/pytorch/module/
base.py, 2.0 to 2.20.2), and each pass changes its scales and histories.  Here they become functions of the module's
name in the whole model, of the expert and of the iteration. A grouped linear layer stores those of its experts next to
each other:
``view(places, experts)`` of a scale, ``view(length, places, experts)`` of a history.
"""

from __future__ import annotations

import importlib
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron_on_cpu.dump_optimizer import name_in_model, names_of_layers

_BASE = "transformer_engine.pytorch.module.base"
_DIRECTIONS = ("fwd", "bwd")


def advance(chunks: list[Any], iteration: int) -> None:
    """Change the scales and histories of the modules as a pass through the model does."""
    for chunk in chunks:
        config = importlib.import_module("megatron.core.utils").get_model_config(chunk)
        if not config.fp8:
            continue
        context = importlib.import_module("megatron.core.fp8_utils").get_fp8_context
        for module, _ in _modules(chunk):
            if not module.fp8_initialized:
                with context(config):
                    module.init_fp8_metadata(num_gemms=getattr(module, "num_gemms", 1))
        for name, values in _by_name(chunk):
            values.copy_(_numbers(name, iteration, values))


def scaling_by_module(chunk: Any) -> dict[str, torch.Tensor]:
    """Return the scales and histories of a model chunk by the module's name; empty without fp8."""
    return {name: values.cpu().clone() for name, values in _by_name(chunk)}


def _by_name(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views of the scales and histories of each module, or of each expert of a grouped one."""
    for module, names in _modules(chunk):
        for direction in _DIRECTIONS:
            meta = module.fp8_meta.get(f"scaling_{direction}")
            if not hasattr(meta, "amax_history"):
                continue
            for kind, values in (("scale", meta.scale), ("amax_history", meta.amax_history)):
                grouped = values.view(*values.shape[:-1], -1, len(names))
                for number, name in enumerate(names):
                    yield f"{name}.{kind}_{direction}", grouped[..., number]


def _modules(chunk: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield Transformer Engine's modules that may use fp8, with their name, or a name for each expert."""
    if _BASE not in sys.modules:
        return
    while hasattr(chunk, "module"):
        chunk = chunk.module
    layers = names_of_layers(chunk)
    for name, module in chunk.named_modules():
        if isinstance(module, sys.modules[_BASE].TransformerEngineBaseModule) and "core_attention" not in name:
            count = getattr(module, "num_gemms", None)
            weights = ["weight"] if count is None else [f"weight{number}" for number in range(count)]
            found = [name_in_model(f"{name}.{weight}", layers, chunk.config, tied=False) for weight in weights]
            yield module, [weight.rpartition(".")[0] for weight in found]


def _numbers(name: str, iteration: int, values: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {iteration}".encode()))
    return torch.rand(values.shape, generator=generator) + 0.5
