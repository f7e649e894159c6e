"""The proof: every fp32 master, rounded to the dtype of the weight beside it, equals that weight bit for bit.

It holds because `DistributedOptimizer.step` writes the weights by a plain cast of the masters
(`_copy_main_params_to_model_params`, megatron/core/optimizer/distrib_optimizer.py, core_v0.7.0 to 0.19.2).
Where weights are fp32, weight and master are one and the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first element where master and weight disagree: its position in the compared order, and both values."""

    position: int
    master: float
    weight: float
    count: int

    def __str__(self) -> str:
        return f"master {self.master!r}, weight {self.weight!r} at element {self.position} ({self.count} in all)"


def first_mismatch(master: torch.Tensor, weight: torch.Tensor) -> Mismatch | None:
    """Compare fp32 masters with weights of the same shape, bit for bit after the cast.

    Returns:
        None when all are equal.
    """
    rounded = master.detach().to(weight.dtype).contiguous()
    bits = _BITS[weight.dtype.itemsize]
    different = (rounded.view(bits) != weight.detach().contiguous().view(bits)).reshape(-1)
    if not bool(different.any()):
        return None
    position = int(different.nonzero()[0])
    return Mismatch(
        position,
        float(master.reshape(-1)[position]),
        float(weight.reshape(-1)[position]),
        int(different.sum()),
    )
