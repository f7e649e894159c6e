"""The state that the inner optimizers of Megatron keep for a parameter."""

from __future__ import annotations

from typing import Any

import torch

from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ
from mcore_ckpt_ext.optimizers.description import MOMENTUM
from mcore_ckpt_ext.optimizers.groups import keeps_nothing


def kept_by(optimizer: Any) -> tuple[str, ...] | None:
    """Return the kinds of state that a plain optimizer keeps for a parameter, all in its shape.

    Sources: `TensorParallelMuon` (megatron/core/optimizer/muon.py, core_v0.16.0, 0.16.1; emerging_optimizers.py since
    0.17) and `Lion` (emerging_optimizers, 0.3.0). Others of that package may have Adam's settings but other state
    (SOAP), or Muon's and more (AdaptiveMuon). torch's SGD keeps nothing without momentum (torch/optim/sgd.py, 2.1 to
    2.13), Transformer Engine's does (`get_momentums`, transformer_engine/pytorch/optimizers/fused_sgd.py, 2.20).

    Returns:
        The kinds; None if the optimizer is unknown.
    """
    kind = type(optimizer)
    if is_sgd(optimizer):
        plain = isinstance(optimizer, torch.optim.SGD) and keeps_nothing(optimizer.param_groups)
        return () if plain else (MOMENTUM,)
    if kind.__name__ == "TensorParallelMuon":
        return (MOMENTUM,)
    if kind.__name__ == "Lion":
        return (EXP_AVG,)
    foreign = any(base.__module__.startswith("emerging_optimizers.") for base in kind.__mro__)
    is_adam = all("betas" in group and "eps" in group for group in optimizer.param_groups)
    return (EXP_AVG, EXP_AVG_SQ) if is_adam and not foreign else None


def is_sgd(optimizer: Any) -> bool:
    """Return True if a plain optimizer is SGD: torch's, or the fused one of Transformer Engine and Apex."""
    return isinstance(optimizer, torch.optim.SGD) or type(optimizer).__name__ == "FusedSGD"
