"""Plugin: each rank prints its seed and a digest of its random state when training begins."""

from __future__ import annotations

import functools
from typing import Any
from zlib import crc32

import torch
from megatron.training import training


def install() -> None:
    """Wrap `train`."""
    original = training.train

    @functools.wraps(original)
    def train(*positional: Any, **keywords: Any) -> Any:
        digest = crc32(torch.get_rng_state().numpy().tobytes())
        print(f"random state: seed {torch.initial_seed()}, digest {digest}", flush=True)
        return original(*positional, **keywords)

    training.train = train


install()
