"""Replaces the FusedAdam of Apex and Transformer Engine on the CPU.

It has the same arithmetic and the same *layout of the state*, which is stored in checkpoints: ``step`` is in the
parameter group, and a parameter's state holds only ``exp_avg`` and ``exp_avg_sq``.  With torch's AdamW, ``step`` is a
tensor per parameter, and stock Megatron cannot resume its own checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam (or AdamW, with ``adam_w_mode``) over flat fp32 shards."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None, **_: Any) -> None:  # type: ignore[override]
        """Advance every parameter that has a gradient."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                gradient = self._gradient(parameter)
                if gradient is not None:
                    self._advance(parameter, gradient.float(), group)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    def _advance(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter.data)
            state["exp_avg_sq"] = torch.zeros_like(parameter.data)
        advance(parameter, gradient, state["exp_avg"], state["exp_avg_sq"], group, self.adam_w_mode)


def advance(
    master: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    group: dict[str, Any],
    adam_w_mode: bool,
) -> None:
    """Do one step of Adam on fp32 tensors, in place."""
    beta1, beta2 = group["betas"]
    correction1 = 1 - beta1 ** group["step"] if group["bias_correction"] else 1.0
    correction2 = 1 - beta2 ** group["step"] if group["bias_correction"] else 1.0
    if not adam_w_mode:
        gradient = gradient + group["weight_decay"] * master
    exp_avg.mul_(beta1).add_(gradient, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    update = (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt() + group["eps"])
    if adam_w_mode:
        update = update + group["weight_decay"] * master
    master.add_(update, alpha=-group["lr"])
