"""Plugin: norms of a bf16 model stay in fp32 where TEST_NORMS_IN_FP32 is set, as in models of users' own.

Since 0.20 `mark_keep_in_fp32` (megatron/core/transformer/module.py) does so for parameters that a model marks.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from megatron.core.transformer.module import Float16Module


def to_fp32(norm: torch.nn.Module) -> None:
    """Compute a norm in fp32, between neighbors in bf16."""
    norm.float()
    norm.register_forward_pre_hook(lambda module, values: tuple(value.float() for value in values))
    norm.register_forward_hook(lambda module, values, result: result.bfloat16())


def install() -> None:
    """Wrap the cast of the model."""
    original = Float16Module.__init__

    @functools.wraps(original)
    def initialize(self: Any, *positional: Any, **keywords: Any) -> None:
        original(self, *positional, **keywords)
        for module in self.modules() if "TEST_NORMS_IN_FP32" in os.environ else ():
            if isinstance(module, torch.nn.RMSNorm):
                to_fp32(module)

    Float16Module.__init__ = initialize


install()
