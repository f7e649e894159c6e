"""Trains without forward and backward passes: a plugin of ``launch.run`` for models whose kernels need a GPU.

The gradient of each element is computed from its weight and the iteration. It passes through the genuine gradient
buffers and optimizer, so a job that resumes exactly continues exactly under any layout. This requires ``--clip-grad
0``, because a norm is summed in an order that depends on the layout. The loss is computed from the iteration only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_on_cpu import fp8_scaling

_SIZE = 2.0**-4
# Neither has a short period among the numbers of bf16.
_OF_WEIGHT, _OF_ITERATION = 1013.13, 0.618034


def gradient(weight: torch.Tensor, iteration: int) -> torch.Tensor:
    """Return the gradient for each element, between -1/32 and 1/32."""
    return (torch.frac(weight.detach().float() * _OF_WEIGHT + iteration * _OF_ITERATION)) * _SIZE / 2


def install() -> None:
    """Replace the passes, and initialize norms and biases with distinct elements."""
    training: Any = importlib.import_module("megatron.training.training")
    make_optimizer = training.get_megatron_optimizer

    @functools.wraps(make_optimizer)
    def get_megatron_optimizer(config: Any, model_chunks: Sequence[Any], *more: Any, **options: Any) -> Any:
        for chunk, model in enumerate(model_chunks):
            _scatter(model, chunk)
        return make_optimizer(config, model_chunks, *more, **options)

    training.get_megatron_optimizer = get_megatron_optimizer
    with contextlib.suppress(ImportError):  # since 0.19; only a forward pass of a gated delta net needs its kernels
        nets: Any = [importlib.import_module(f"megatron.core.ssm.gated_delta_net.{name}") for name in ("common", "gdn")]
        nets[0].HAVE_FLA, nets[1].chunk_gated_delta_rule = True, _passes
    training.get_forward_backward_func = lambda *_, **__: _passes


def _scatter(model: torch.nn.Module, chunk: int) -> None:
    """Initialize vectors with values that are equal only on ranks with a copy of the same parameter."""
    state: Any = importlib.import_module("megatron.core.parallel_state")
    for name, parameter in model.named_parameters():
        if parameter.dim() != 1:
            continue
        place = [name, chunk, state.get_pipeline_model_parallel_rank()]
        if not getattr(parameter, "allreduce", True):
            place += [state.get_expert_model_parallel_rank(), state.get_expert_tensor_parallel_rank()]
        elif getattr(parameter, "tensor_model_parallel", False):
            place.append(state.get_tensor_model_parallel_rank())
        generator = torch.Generator().manual_seed(zlib.crc32(repr(place).encode()))
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.1)


@torch.no_grad()
def _passes(*, model: Any, **_: Any) -> list[dict[str, torch.Tensor]]:
    """Produce the results of a schedule: reduced gradients, and the losses on the last stage."""
    iteration = importlib.import_module("megatron.training").get_args().curr_iteration
    chunks = model if isinstance(model, list) else [model]
    fp8_scaling.advance(chunks, iteration)
    for chunk in chunks:
        for parameter, factor in _scaled(chunk):
            values = parameter.dequantize() if hasattr(parameter, "dequantize") else parameter
            parameter.main_grad.copy_(gradient(values, iteration) / factor)
        chunk.finish_grad_sync()
    if not importlib.import_module("megatron.core.parallel_state").is_pipeline_last_stage():
        return []
    return [{"lm loss": torch.tensor([64.0 + iteration, 64.0])}]


def _scaled(chunk: Any) -> Iterator[tuple[Any, float]]:
    """Yield parameters with the factor by which the reduction of their buffers multiplies equal gradients."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        factor = buffer.gradient_scaling_factor * dist.get_world_size(buffer.data_parallel_group)
        for parameter in buffer.param_index_map:
            yield parameter, factor


if __name__ == "<run_path>":  # as a plugin
    importlib.import_module("megatron_on_cpu.synthetic_training").install()
