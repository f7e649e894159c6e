"""Forward passes in torch for the modules of Transformer Engine's stand-in: a plugin of ``launch.run``.

A module computes what Transformer Engine documents: a norm, a product with its weights, or attention. The modules,
their parameters and all other code are genuine, so the output of a model shows how Megatron uses each parameter. Gated
delta nets get the functions of flash-linear-attention that Megatron imports by name.

Read in Transformer Engine 2.20.2: transformer_engine/pytorch/module (linear, layernorm_linear, grouped_linear, rmsnorm,
layernorm) and attention/dot_product_attention; megatron/core/ssm/gated_delta_net/common.py (core_v0.19.2).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functions


def install() -> None:
    """Give the modules their forward passes."""
    engine: Any = importlib.import_module("transformer_engine.pytorch")
    engine.Linear.forward = _linear
    engine.LayerNormLinear.forward = _norm_and_linear
    engine.GroupedLinear.forward = _grouped_linear
    engine.RMSNorm.forward = lambda self, values: _normed(self, values, self.weight, None)
    engine.LayerNorm.forward = lambda self, values: _normed(self, values, self.weight, self.bias)
    engine.DotProductAttention.forward = _attention
    # The router then multiplies with torch.
    importlib.import_module("megatron.core.transformer.moe.moe_utils").te_general_gemm = None
    provide_delta_net_functions()


def provide_delta_net_functions() -> None:
    """Give gated delta nets the functions of flash-linear-attention."""
    common: Any = importlib.import_module("megatron.core.ssm.gated_delta_net.common")
    nets: Any = importlib.import_module("megatron.core.ssm.gated_delta_net.gdn")
    common.HAVE_FLA = True
    for module in (common, nets):
        module.l2norm = _unit_length
        module.causal_conv1d = _causal_convolution
        module.chunk_gated_delta_rule = _gated_delta_rule


def _normed(self: Any, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    scale = weight + 1 if self.zero_centered_gamma else weight
    if bias is not None:
        return functions.layer_norm(values, weight.shape, scale, bias, self.eps)
    return functions.rms_norm(values, weight.shape, scale, self.eps)


def _linear(self: Any, values: torch.Tensor, *_: Any, **__: Any) -> Any:
    (weight,) = self._get_weight_tensors()
    bias = self.bias if self.use_bias else None
    rows = self.parallel_mode == "row" and self.tp_size > 1
    inside = None if rows or self.return_bias else bias
    found = functions.linear(values, weight, inside)
    if rows:
        dist.all_reduce(found, group=self.tp_group)
        found = found if bias is None or self.return_bias else found + bias
    return (found, bias) if self.return_bias else found


def _norm_and_linear(self: Any, values: torch.Tensor, *_: Any, **__: Any) -> Any:
    bias = self.layer_norm_bias if self.normalization == "LayerNorm" else None
    return _linear(self, _normed(self, values, self.layer_norm_weight, bias))


def _grouped_linear(self: Any, values: torch.Tensor, splits: Sequence[int], *_: Any, **__: Any) -> Any:
    biases = [getattr(self, f"bias{number}") for number in range(self.num_gemms)] if self.use_bias else None
    found = [
        functions.linear(part, weight, None if biases is None or self.return_bias else biases[number])
        for number, (part, weight) in enumerate(
            zip(values.split(list(splits)), self._get_weight_tensors(), strict=True)
        )
    ]
    return (torch.cat(found), biases) if self.return_bias else torch.cat(found)


def _attention(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """Compute causal attention with the module's window and sinks; `[sequence, batch, heads, width]`."""
    shared = query.shape[2] // key.shape[2]
    query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * self.softmax_scale
    positions = torch.arange(query.shape[2])
    distance = positions[:, None] - positions
    hidden = distance < 0
    if self.window_size is not None and self.window_size[0] >= 0:
        hidden = hidden | (distance > self.window_size[0])
    scores = scores.masked_fill(hidden, float("-inf"))
    if getattr(self, "softmax_offset", None) is not None:
        sinks = self.softmax_offset.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        probabilities = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return (probabilities @ value).permute(2, 0, 1, 3).flatten(2)


def _unit_length(values: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    return values * torch.rsqrt(values.square().sum(dim, keepdim=True) + eps)


def _causal_convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, **_: Any) -> tuple[torch.Tensor, None]:
    """Compute a causal convolution of `[batch, sequence, channels]`, then SiLU."""
    length, width = x.shape[1], weight.shape[-1]
    found = functions.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=width - 1, groups=weight.shape[0])
    return functions.silu(found[..., :length]).transpose(1, 2), None


def _gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Compute the gated delta rule token by token; all `[batch, sequence, heads]`, the first three with a width.

    It uses double precision: Megatron's own function (`torch_chunk_gated_delta_rule`) inverts a matrix in single
    precision,
    whose rounding differs between processors by more than a wrong epsilon would.
    """
    steps = [part.double().transpose(0, 1) for part in (query * query.shape[-1] ** -0.5, key, value, g.exp(), beta)]
    state = query.new_zeros((*query.shape[:1], *query.shape[2:], value.shape[-1]), dtype=torch.float64)
    found = []
    for asked, place, new, decay, rate in zip(*steps, strict=True):
        state = state * decay[..., None, None]
        known = (place[..., None] * state).sum(-2)
        state = state + place[..., None] * ((new - known) * rate[..., None])[..., None, :]
        found.append((asked[..., None] * state).sum(-2))
    return torch.stack(found, 1).to(query.dtype), None


if __name__ == "<run_path>":  # as a plugin
    importlib.import_module("megatron_on_cpu.engine_passes").install()
