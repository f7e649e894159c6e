"""Splits fp32 masters into bf16 weights and int16 remainders, and joins them.

`store_param_remainders` of Transformer Engine's FusedAdam (transformer_engine/pytorch/optimizers/fused_adam.py, 2.1 to
2.20; `AdamFunctorMasterParamRemainder` of transformer_engine/common/multi_tensor/adam.cu): the weight has the upper
16 bits of the master, plus one if the lower ones, read as a signed number, are negative. So the weight is the master
rounded to nearest, with ties away from zero, where a cast to bf16 rounds to even. Every pair of a weight and a
remainder is a valid master, so the values do not show which remainder belongs to which weight.
"""

from __future__ import annotations

import sys

from mcore_ckpt_ext.lazy_torch import torch

# The positions of the two halves of a 32-bit number in memory.
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


def join(weights: torch.Tensor, remainders: torch.Tensor) -> torch.Tensor:
    """Return the fp32 masters, with the shape of the weights.

    Args:
        weights: bf16.
        remainders: int16, with the same number of elements.
    """
    halves = torch.empty((*weights.shape, 2), dtype=torch.int16, device=weights.device)
    halves[..., _LOW] = remainders.reshape(weights.shape)
    # int16 arithmetic wraps around, as in the kernel.
    halves[..., _HIGH] = weights.contiguous().view(torch.int16) - halves[..., _LOW].lt(0).to(torch.int16)
    return halves.view(torch.float32).squeeze(-1)


def split(masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bf16 weights and the int16 remainders of fp32 masters, with the same shape."""
    halves = masters.contiguous().unsqueeze(-1).view(torch.int16)
    remainders = halves[..., _LOW].contiguous()
    weights = halves[..., _HIGH] + remainders.lt(0).to(torch.int16)
    return weights.view(torch.bfloat16), remainders


def are_numbers_of_remainders(values: torch.Tensor) -> bool:
    """Return whether floating-point values may be remainders.

    `fully_reshardable` stores remainders as numbers.
    """
    return bool((values == values.to(torch.int16).to(values.dtype)).all())
