"""Context parallelism with the local spec, whose attention refuses it: a plugin of ``launch.run``.

Each rank's queries attend to the keys and values of all ranks of its group; the backward pass sums their gradients. A
rank has the sequence's parts number `rank` and `2 * ranks - 1 - rank` of `2 * ranks` (`get_batch_on_this_cp_rank`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention


class _Gathered(torch.autograd.Function):
    """The whole sequence from the two parts of all ranks, along the first axis."""

    @staticmethod
    def forward(context: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        ranks = torch.distributed.get_world_size(group)
        context.group, context.rank, context.ranks = group, torch.distributed.get_rank(group), ranks
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(ranks)]
        torch.distributed.all_gather(parts, own.contiguous(), group=group)
        halves = [part.chunk(2) for part in parts]
        return torch.cat([*(first for first, _ in halves), *(second for _, second in reversed(halves))])

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.float().contiguous()
        torch.distributed.all_reduce(total, group=context.group)
        parts = total.chunk(2 * context.ranks)
        own = torch.cat([parts[context.rank], parts[-1 - context.rank]])
        return own.to(gradient.dtype), None


def install() -> None:
    """Wrap building and running the local attention."""
    build, run = DotProductAttention.__init__, DotProductAttention.forward

    @functools.wraps(build)
    def initialize(self: Any, config: Any, *positional: Any, **keywords: Any) -> None:
        ranks, config.context_parallel_size = config.context_parallel_size, 1
        try:
            build(self, config, *positional, **keywords)
        finally:
            config.context_parallel_size = ranks

    @functools.wraps(run)
    def forward(self: Any, query: Any, key: Any, value: Any, *positional: Any, **keywords: Any) -> Any:
        group = parallel_state.get_context_parallel_group()
        if torch.distributed.get_world_size(group) > 1:
            key, value = _Gathered.apply(key, group), _Gathered.apply(value, group)
        return run(self, query, key, value, *positional, **keywords)

    DotProductAttention.__init__ = initialize
    DotProductAttention.forward = forward


if __name__ == "<run_path>":  # as a plugin
    install()
