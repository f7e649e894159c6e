"""Boosts GPT-2 with each of the plugins whose files the package writes, in ZeRO stage 1 or more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mcore_ckpt_ext import zero_strict_state_dict as strict
from tests.colossalai import boosted
from tests.colossalai.asynchronous_writer import AsyncFileWriter
from tests.colossalai.models import gpt2

PLUGINS = ("gemini", "low_level_zero", "hybrid_parallel")


def boost(plugin: str, build: Callable[[], Any] = gpt2, seed: int = 0, is_stock: bool = False) -> tuple[Any, Any, Any]:
    """A Booster, and the model and optimizer that it wrapped; the package is installed for all plugins, or for none."""
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin
    from colossalai.nn.optimizer import HybridAdam
    from colossalai.utils import safetensors

    safetensors.AsyncFileWriter = AsyncFileWriter
    if is_stock:
        strict.uninstall()
    else:
        strict.install(plugins=PLUGINS)
    if plugin == "gemini":
        return boosted.boost(build, seed=seed)
    torch.manual_seed(seed)
    module = build()
    plugins = {
        "low_level_zero": lambda: LowLevelZeroPlugin(stage=1, precision="bf16"),
        "hybrid_parallel": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1, precision="bf16"),
    }
    booster = Booster(plugin=plugins[plugin]())
    model, optimizer, *_ = booster.boost(module, HybridAdam(module.parameters(), lr=1e-2))
    return booster, model, optimizer
