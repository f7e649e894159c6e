"""The state of ColossalAI's dynamic loss scaler, which its optimizers do not save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_SCALER = ("_growth_step", "_hysteresis_step")


def _scaler(optimizer: Any) -> Any:
    """Return the dynamic loss scaler of fp16 training; None if there is none.

    Gemini, ZeRO 1 and 2, and AMP name its holder differently (0.5.0, amp/naive_amp/grad_scaler/dynamic_grad_scaler.py).
    """
    names = ("mix_precision_mixin", "mixed_precision_mixin", "mixed_precision")
    holders = (getattr(optimizer, name, None) for name in names)
    scalers = (getattr(holder, "grad_scaler", None) for holder in holders)
    return next((scaler for scaler in scalers if all(hasattr(scaler, name) for name in ("_scale", *_SCALER))), None)


def loss_scale(optimizer: Any) -> dict[str, float] | None:
    """Return the state of the dynamic loss scaler; None if there is none.

    The values are floats, so that pickles have the same length at any step: asynchronous saves reuse a buffer for them
    (0.5.0, utils/safetensors.py: _flatten_optim_state_dict; booster/plugin/gemini_plugin.py: save_unsharded_optimizer).
    """
    scaler = _scaler(optimizer)
    if scaler is None:
        return None
    return {"scale": float(scaler.scale), **{name: float(getattr(scaler, name)) for name in _SCALER}}


def set_loss_scale(optimizer: Any, saved: Mapping[str, float]) -> None:
    """Set the state of the dynamic loss scaler, if there is one, to a state from `loss_scale`."""
    scaler = _scaler(optimizer)
    if scaler is not None:
        scaler._scale = torch.full_like(scaler._scale, saved["scale"])
        for name in _SCALER:
            setattr(scaler, name, int(saved[name]))
