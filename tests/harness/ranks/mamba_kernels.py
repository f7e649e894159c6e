"""The kernels of Megatron's Mamba mixers as torch arithmetic: a plugin of `launch.run`.

The mixers and their parameters are genuine. `mamba_ssm` gets the two modules from which Megatron imports functions
(megatron/core/ssm/mamba_mixer.py, core_v0.19.2).

Source of the arithmetic: Dao and Gu, "Transformers are SSMs" (2024), equation 6 with a scalar decay for each head; the
parameters are those of `mamba_split_conv1d_scan_combined` and `RMSNorm` of mamba_ssm 2.2.4.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch
import torch.nn.functional as functions


class GroupedRMSNorm(torch.nn.Module):
    """A norm of each group of elements; the mixer has gated them already."""

    def __init__(
        self, size: int, *, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        groups = values.unflatten(-1, (-1, self.group_size))
        return functions.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def convolve_and_scan(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    step_bias: torch.Tensor,
    decay: torch.Tensor,
    *,
    D: torch.Tensor,  # noqa: N803
    headdim: int,
    ngroups: int,
    norm_before_gate: bool,
    activation: str,
    **_: Any,
) -> torch.Tensor:
    """Compute a mixer between its projections, token by token: `[batch, sequence, inner]`.

    `inputs`: gates, values, keys, queries and time steps of each token.
    """
    assert activation == "silu" and not norm_before_gate
    heads, length = decay.shape[0], inputs.shape[1]
    inner, width = heads * headdim, weight.shape[-1]
    gates, mixed, steps = inputs.split([inner, weight.shape[0], heads], dim=-1)
    mixed = functions.conv1d(mixed.mT, weight[:, None], bias, padding=width - 1, groups=weight.shape[0])[..., :length]
    parts = functions.silu(mixed.mT).split([inner, *[(weight.shape[0] - inner) // 2] * 2], dim=-1)
    values = parts[0].unflatten(-1, (heads, headdim))
    keys, queries = (part.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, dim=2) for part in parts[1:])
    steps = functions.softplus(steps + step_bias)
    state = values.new_zeros(*values.shape[:1], *values.shape[2:], keys.shape[-1])
    found = []
    for step, value, key, query in zip(*(part.unbind(1) for part in (steps, values, keys, queries)), strict=True):
        update = (step[..., None] * value)[..., None] * key[..., None, :]
        state = state * (step * decay).exp()[..., None, None] + update
        found.append((state * query[..., None, :]).sum(-1) + D[:, None] * value)
    return (torch.stack(found, dim=1).flatten(2) * functions.silu(gates)).to(inputs.dtype)


def _offer(name: str, **members: Any) -> None:
    sys.modules[name] = module = types.ModuleType(name)
    module.__dict__.update(members, __path__=[])


for _package in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
    _offer(_package)
_offer("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=GroupedRMSNorm)
_offer(
    "mamba_ssm.ops.triton.ssd_combined",
    mamba_split_conv1d_scan_combined=convolve_and_scan,
    mamba_chunk_scan_combined=convolve_and_scan,
)
# Ranks may start with Megatron's modules imported; then its functions find the new ones in their module.
importlib.reload(importlib.import_module("megatron.core.ssm.mamba_mixer"))
