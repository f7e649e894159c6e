"""fp32 masters split into bf16 weights and the int16 that those lack, and joined again.

`store_param_remainders` of Transformer Engine's FusedAdam (transformer_engine/pytorch/optimizers/fused_adam.py, 2.1 to
2.20; `AdamFunctorMasterParamRemainder` of transformer_engine/common/multi_tensor/adam.cu): the weight holds the upper
16 bits of the master, one more where the lower ones, read as a signed number, are negative. So the weight is the master
rounded to nearest, but ties go away from zero, where a cast to bf16 takes the even neighbour. Every pair of a weight
and a remainder belongs to some master: the numbers do not show which remainder belongs to which weight.
"""

from __future__ import annotations

import sys

from mcore_ckpt_ext.lazy_torch import torch

# Which half of a 32-bit number comes first in memory.
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


def join(weights: torch.Tensor, remainders: torch.Tensor) -> torch.Tensor:
    """The fp32 masters, shaped like the weights.

    Args:
        weights: bf16.
        remainders: int16, with as many elements.
    """
    halves = torch.empty((*weights.shape, 2), dtype=torch.int16, device=weights.device)
    halves[..., _LOW] = remainders.reshape(weights.shape)
    # Arithmetic of int16 wraps around, as it does in the kernel.
    halves[..., _HIGH] = weights.contiguous().view(torch.int16) - halves[..., _LOW].lt(0).to(torch.int16)
    return halves.view(torch.float32).squeeze(-1)


def split(masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 weights and the int16 remainders of fp32 masters, each shaped like them."""
    halves = masters.contiguous().unsqueeze(-1).view(torch.int16)
    remainders = halves[..., _LOW].contiguous()
    weights = halves[..., _HIGH] + remainders.lt(0).to(torch.int16)
    return weights.view(torch.bfloat16), remainders


def are_numbers_of_remainders(values: torch.Tensor) -> bool:
    """Whether floating-point values can be the numbers of int16 remainders, as `fully_reshardable` stores them."""
    return bool((values == values.to(torch.int16).to(values.dtype)).all())
