"""Boosts Hugging Face's GPT-2 as users do, with and without tensor parallelism."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.colossalai.models import VOCABULARY, gpt2


def boost(
    build: Callable[[], nn.Module] = gpt2, *, tensor_parallel: int = 1, precision: str = "bf16", seed: int = 0,
    zero_size: int | None = None, chunk_size: int = 4096, **plugin: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """A Booster, and the model and optimizer that it wrapped."""
    import colossalai.logging
    from colossalai.booster import Booster
    from colossalai.booster.plugin import GeminiPlugin
    from colossalai.nn.optimizer import HybridAdam

    colossalai.logging.disable_existing_loggers(["colossalai"])
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    module = build()
    zero_size = zero_size or dist.get_world_size() // tensor_parallel
    chunks = {zero_size: {"chunk_size": chunk_size, "keep_gathered": False}}
    gemini = GeminiPlugin(
        precision=precision, tp_size=tensor_parallel, chunk_config_dict=chunks, initial_scale=128, **plugin
    )
    booster = Booster(plugin=gemini)
    model, optimizer, *_ = booster.boost(module, HybridAdam(module.parameters(), lr=1e-2))
    return booster, model, optimizer


def batch(step: int) -> dict[str, torch.Tensor]:
    """What all ranks are fed at a step; Shardformer's GPT-2 (0.5.0, modeling/gpt2.py) needs all three."""
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def train(booster: Any, model: Any, optimizer: Any, steps: range) -> list[float]:
    """The losses of some steps, all ranks with the same data."""
    losses = []
    for step in steps:
        loss = model(**batch(step)).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
