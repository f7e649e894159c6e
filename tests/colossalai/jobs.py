"""Trains with the genuine ColossalAI inside a rank: wrappers, steps, and the masters' values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.colossalai.models import VOCABULARY, TinyGPT

PLACEMENTS: dict[str, dict[str, Any]] = {
    "static": {},
    "zero2": {"shard_param_frac": 0.0},
    "optimizer offload": {"offload_optim_frac": 1.0},
    "full offload": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "pin_memory": True},
    "keep gathered": {"keep_gathered": True},
    "auto": {"placement_policy": "auto"},
    "accumulation": {"enable_gradient_accumulation": True},
}


def wrap(
    build: Callable[[], nn.Module] = TinyGPT, *, dtype: torch.dtype = torch.bfloat16, chunk_size: int = 2048,
    keep_gathered: bool = False, ignore: tuple[str, ...] = (), seed: int = 0, lr: float = 1e-2, with_shapes: bool =
        False, zero_size: int | None = None, **placement: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """A GeminiDDP and its optimizer; chunks are small, so that there are several.

    With `with_shapes` the optimizer is told what Booster tells it, and what ColossalAI's own saving needs.
    """
    from colossalai.nn.optimizer import HybridAdam
    from colossalai.zero import GeminiDDP, GeminiOptimizer

    torch.manual_seed(seed)
    module = build()
    for name in ignore:
        GeminiDDP.set_params_to_ignore([module.get_parameter(name)])
    chunks = {zero_size or dist.get_world_size(): {"chunk_size": chunk_size, "keep_gathered": keep_gathered}}
    model = GeminiDDP(
        module, chunk_config_dict=chunks, chunk_init_device=torch.device("cpu"), mixed_precision=dtype, **placement
    )
    shapes = {"id2shape": dict(enumerate(parameter.shape for parameter in model.parameters()))}
    adam = HybridAdam(model.parameters(), lr=lr)
    return model, GeminiOptimizer(adam, model, initial_scale=128.0, params_info=shapes if with_shapes else None)


def batch(step: int, sequences: int = 4, length: int = 8, share: bool = True) -> torch.Tensor:
    """A batch that is the same for every number of ranks, or this rank's share of it."""
    tokens = torch.randint(0, VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(step)).cuda()
    return tokens.chunk(dist.get_world_size())[dist.get_rank()] if share else tokens


def train(model: Any, optimizer: Any, steps: range, same_data: bool = False) -> list[float]:
    """The losses of some steps, with this rank's part of the data, or all ranks with the same."""
    losses = []
    for step in steps:
        tokens = batch(step, share=not same_data)
        output = model(tokens)
        logits = getattr(output, "logits", output).float()
        loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gathered_masters(model: Any) -> dict[str, torch.Tensor]:
    """The fp32 masters by name, gathered by hand with nothing but torch: what everything else is compared with."""
    masters = {}
    for parameter, master in zip(model.fp16_params, model.fp32_params, strict=True):
        chunk = model.chunk_manager.get_chunk(master)
        info = chunk.tensors_info[master]
        if chunk.is_gathered:
            total = chunk.cuda_global_chunk
        else:
            held = (chunk.cpu_shard if chunk.cuda_shard is None else chunk.cuda_shard).cuda()
            shards = [torch.empty_like(held) for _ in range(chunk.pg_size)]
            dist.all_gather(shards, held, group=chunk.torch_pg)
            total = torch.cat(shards)
        masters[model.param2name[parameter]] = total[info.offset : info.end].view(parameter.shape).cpu()
    return masters


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, so that equal means equal in every bit."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Whether two state dicts have the same names and the same values, dtype and bits."""
    return list(left) == list(right) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
        for a, b in zip(left.values(), right.values(), strict=True)
    )


def refusal(call: Callable[[], Any]) -> str:
    """What the call is refused with."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")
