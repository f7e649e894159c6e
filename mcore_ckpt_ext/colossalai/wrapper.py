"""Describes a ZeRO wrapper of ColossalAI: its module and the places of the parameters' values.

Versions differ, so attributes are looked up. ``ZeroDDP`` of 0.2.0 (nn/parallel/data_parallel.py) has only
``fp32_params``; ``ZeroDDP`` of 0.2.1 to 0.3.1 and ``GeminiDDP`` of 0.3.2 to 0.5.1 (zero/gemini/gemini_ddp.py) also have
``fp16_params``, in the same order. Chunks have the same attributes in all of them (chunk.py: ``Chunk``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from mcore_ckpt_ext.colossalai import tensor_parallel
from mcore_ckpt_ext.colossalai.ranks import Ranks
from mcore_ckpt_ext.errors import CheckpointError

_NEEDED = ("module", "chunk_manager", "fp32_params")


class Place(NamedTuple):
    """The elements ``begin`` to ``end`` of a chunk, which hold one parameter or its fp32 master."""

    chunk: Any
    begin: int
    end: int

    def local(self) -> tuple[torch.Tensor, int, int]:
        """Return this rank's part of the place, and the range of the parameter's elements (from, to) in it."""
        chunk = self.chunk
        if chunk.is_gathered:
            return chunk.cuda_global_chunk[self.begin : self.end], 0, self.end - self.begin
        first = max(self.begin, chunk.shard_begin)
        last = min(self.end, chunk.shard_end)
        if first >= last:
            return chunk.payload[:0], 0, 0
        held = chunk.payload[first - chunk.shard_begin : last - chunk.shard_begin]
        return held, first - self.begin, last - self.begin


@dataclass(frozen=True)
class Wrapped:
    """The data of a wrapper that saving and loading need.

    Args:
        module: the user's module.
        working: the place of each working parameter in chunks, in their order.
        masters: the same for the fp32 masters; empty if the wrapper keeps none.
        outside: parameters that ColossalAI does not manage: ignored or frozen ones.
        compute_dtype: the dtype of the forward pass.
        group: the ranks that share the chunks.
        ranks: the ranks of `group`, their replicas, and their partners in tensor parallelism.
        names: every name of each parameter.
    """

    module: nn.Module
    working: dict[nn.Parameter, Place]
    masters: dict[nn.Parameter, Place]
    outside: tuple[nn.Parameter, ...]
    compute_dtype: torch.dtype
    group: Any
    ranks: Ranks
    names: dict[nn.Parameter, list[str]]

    @property
    def is_first(self) -> bool:
        """True on rank 0 of the ranks that share the chunks."""
        return dist.get_rank(self.group) == 0

    @property
    def first_rank(self) -> int:
        """The rank in the job of rank 0 of the group."""
        return 0 if self.group is None else dist.get_global_rank(self.group, 0)


def inspect_wrapper(model: Any) -> Wrapped:
    """Inspect a ZeRO wrapper.

    Raises:
        CheckpointError: the model is no ZeRO wrapper.
    """
    missing = [name for name in _NEEDED if not hasattr(model, name)]
    if missing:
        raise CheckpointError(
            "not a ZeroDDP or GeminiDDP",
            found=f"{type(model).__module__}.{type(model).__qualname__} without {', '.join(missing)}",
            expected="the wrapper that ColossalAI made of the module",
            hint="with Booster, the model that booster.boost returned",
        )
    parameters = list(model.module.parameters())
    working = getattr(model, "fp16_params", None)
    if working is None:
        working = [_partner(model.chunk_manager, master) for master in model.fp32_params]
    places = dict(zip(working, _places(model.chunk_manager, working), strict=True))
    masters = dict(zip(working, _places(model.chunk_manager, model.fp32_params), strict=bool(model.fp32_params)))
    chunks = [place.chunk for place in places.values()]
    group = chunks[0].torch_pg if chunks else getattr(model, "zero_group", None)
    others = (getattr(model, "extra_dp_group", None), *tensor_parallel.groups(parameters))
    return Wrapped(
        module=model.module,
        working=places,
        masters=masters,
        outside=tuple(parameter for parameter in parameters if parameter not in places),
        compute_dtype=getattr(model, "mixed_precision", torch.float16),
        group=group,
        ranks=Ranks((group, *(other for other in others if other is not None))),
        names=_names_of(model.module),
    )


def inspect_module(module: nn.Module, ranks: Ranks) -> Wrapped:
    """Describe a module whose ranks hold its parameters, or tensor-parallel slices of them, themselves."""
    parameters = tuple(module.parameters())
    dtype = parameters[0].dtype if parameters else torch.float32
    return Wrapped(module, {}, {}, parameters, dtype, None, ranks, _names_of(module))


def _names_of(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def persistent_buffers(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a state dict has, by name; of a shared module once, or under each name."""
    for prefix, owner in module.named_modules(remove_duplicate=remove_duplicate):
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), buffer


def _partner(manager: Any, master: torch.Tensor) -> Any:
    """Return the parameter of a master: paired chunks have equal offsets (0.2.0, ``ZeroDDP.__init__``)."""
    chunk = manager.get_chunk(master)
    offset = chunk.tensors_info[master].offset
    tensors = chunk.paired_chunk.tensors_info.items()
    return next(tensor for tensor, info in tensors if info.offset == offset)


def _places(manager: Any, tensors: Iterable[torch.Tensor]) -> Iterator[Place]:
    for tensor in tensors:
        chunk = manager.get_chunk(tensor)
        info = chunk.tensors_info[tensor]
        yield Place(chunk, info.offset, info.end)
