"""Megatron's live model and DistributedOptimizer, seen as slices of model space.

Attributes used, present from core_v0.7.0 to 0.19.2 in megatron/core/optimizer/distrib_optimizer.py:
`gbuf_ranges[buffer][dtypes][bucket]["param_map"][param]["param"]`, `model_param_group_index_map`,
`optimizer.param_groups`, `optimizer.state`; and `sharded_state_dict` of the model chunks. Nothing is imported: the
objects are what the caller hands over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt_ext.errors import ModelMismatchError, UnsupportedCheckpointError
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, LogicalTensor, name_at, stacked_axes


@dataclass(frozen=True)
class LiveParameter:
    """A live parameter: its regions in the order of its memory, and the global tensors they belong to."""

    parameter: torch.Tensor
    regions: tuple[Region, ...]
    tensors: Mapping[str, LogicalTensor]
    may_pad: bool


@dataclass(frozen=True)
class LiveShard:
    """What this rank's optimizer holds of one parameter: elements of `slice`, masters in `main` (1-D)."""

    live: LiveParameter
    slice: Slice
    main: torch.Tensor
    optimizer: Any

    @property
    def name(self) -> str:
        """The parameter's name in model space."""
        return self.live.regions[0].name

    @property
    def weight(self) -> torch.Tensor:
        """This shard's elements of the live weight, 1-D."""
        return self.live.parameter.detach().reshape(-1)[self.slice.start : self.slice.stop]


def distributed_optimizers(optimizer: Any) -> list[Any] | None:
    """The DistributedOptimizers of a (chained) optimizer, stubs left out; None when some child is another kind."""
    children = getattr(optimizer, "chained_optimizers", [optimizer])
    real = [child for child in children if not getattr(child, "is_stub_optimizer", False)]
    return real if all(hasattr(child, "gbuf_ranges") for child in real) else None


def check_supported(optimizers: Sequence[Any]) -> None:
    """Refuse the optimizer variants whose state is not plain fp32 masters and moments.

    Raises:
        UnsupportedCheckpointError: precision-aware, CPU-offloaded, or with fp8 primary weights.
    """
    for optimizer in optimizers:
        found = None
        if getattr(optimizer.config, "use_precision_aware_optimizer", False):
            found = "--use-precision-aware-optimizer: the masters live inside of the fused optimizer"
        elif hasattr(optimizer.optimizer, "sub_optimizers"):
            found = "--optimizer-cpu-offload: the state is split between devices"
        elif any(dtypes[0] == torch.uint8 for ranges in optimizer.gbuf_ranges for dtypes in ranges):
            # Transformer Engine's quantised tensors show a high-precision dtype; their buffers do not.
            found = "fp8 or fp4 primary weights: no weight is the plain rounding of its master"
        if found:
            raise UnsupportedCheckpointError(
                "this optimizer cannot be resumed under another layout",
                found=found,
                helps="resume once without that option, save, and switch it on again; or resume under the old layout",
            )


def stock_stumbles(optimizer: Any, stored: int, resumes_in_place: bool) -> bool:
    """Whether stock Megatron dies while it loads an intact torch_dist checkpoint, whatever the layout.

    Chained optimizers load only as many as were saved; experts have one of their own as soon as there is more than one
    expert-parallel rank (`ChainedOptimizer.load_state_dict`, megatron/core/optimizer/optimizer.py, core_v0.7.0 to
    0.19.2). Sources in megatron/core/optimizer/distrib_optimizer.py: with torch's own Adam (neither Apex nor
    Transformer Engine is installed) `state_dict` asserts that there is one step before there is any (core_v0.10.0 to
    0.19.2); and `load_parameter_state_from_dp_reshardable`, which lacks `no_grad`, cannot copy into masters that are
    views of fp32 parameters (core_v0.15.0 to 0.19.2).

    Args:
        optimizer: the live (chained) optimizer.
        stored: how many chained optimizers the checkpoint's common state tells of; 0 where it tells of none.
        resumes_in_place: it is `load_parameter_state_from_dp_reshardable` that stock would use.
    """
    optimizers = distributed_optimizers(optimizer) or []
    try:
        check_supported(optimizers)
    except UnsupportedCheckpointError:
        return False
    if stored and stored != len(getattr(optimizer, "chained_optimizers", [optimizer])):
        return True
    for child in optimizers:
        inner = child.optimizer
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) and not inner.state:
            return True
        if resumes_in_place and any(p.dtype == torch.float32 for p in child.model_param_group_index_map):
            return True
    return False


def state_keys(optimizers: Sequence[Any]) -> tuple[str, ...]:
    """What the optimizers keep for each element besides the master: both moments of Adam, one of Lion.

    Source: `DistributedOptimizer.optimizer_state_keys`, since core_v0.19.0; before it there was Adam only.
    """
    for optimizer in optimizers:
        return tuple(getattr(optimizer, "optimizer_state_keys", (EXP_AVG, EXP_AVG_SQ)))
    return (EXP_AVG, EXP_AVG_SQ)


def live_parameters(chunks: Sequence[Any]) -> dict[int, LiveParameter]:
    """All parameters and buffers of the model chunks by `id`, described by the model's own sharded state dict."""
    found: dict[int, LiveParameter] = {}
    for chunk in chunks:
        held = {id(tensor) for tensor in (*chunk.parameters(), *chunk.buffers())}
        for entry in _entries(chunk.sharded_state_dict()):
            if id(getattr(entry, "data", None)) in held:
                found[id(entry.data)] = _described(entry)
    return found


def live_names(chunks: Sequence[Any]) -> list[str]:
    """Model-space names of every tensor, parameters and buffers, that the model chunks would store."""
    names: dict[str, None] = {}
    for chunk in chunks:
        for entry in _entries(chunk.sharded_state_dict()):
            if isinstance(getattr(entry, "data", None), torch.Tensor):
                names.update(dict.fromkeys(_described(entry).tensors))
    return list(names)


def registered_names(chunk: Any, live: Mapping[int, LiveParameter]) -> list[str]:
    """Names of a chunk's parameters in registration order."""
    return [live[id(parameter)].regions[0].name for parameter in chunk.parameters() if id(parameter) in live]


def live_shards(optimizers: Sequence[Any], live: Mapping[int, LiveParameter]) -> Iterator[LiveShard]:
    """Every shard that this rank's optimizers hold.

    Raises:
        ModelMismatchError: a parameter is trained but never stored, so that no checkpoint can have it.
    """
    for optimizer in optimizers:
        for buckets in (b for ranges in optimizer.gbuf_ranges for b in ranges.values()):
            for parameter, ranges in (item for bucket in buckets for item in bucket["param_map"].items()):
                described = live.get(id(parameter))
                if described is None:
                    raise ModelMismatchError(
                        "the model trains a parameter that its own sharded state dict does not list",
                        found=f"a parameter of shape {tuple(parameter.shape)}",
                    )
                group, order = optimizer.model_param_group_index_map[parameter]
                main = optimizer.optimizer.param_groups[group]["params"][order]
                local = Slice(described.regions, ranges["param"].start, ranges["param"].end)
                yield LiveShard(described, local, _checked_main(main, local), optimizer)


def _checked_main(main: torch.Tensor, local: Slice) -> torch.Tensor:
    if main.dtype != torch.float32 or main.numel() != local.numel or not main.is_contiguous():
        raise UnsupportedCheckpointError(
            "the optimizer's masters are not plain fp32 shards",
            found=f"{main.dtype}, {main.numel()} elements",
            expected=f"torch.float32, {local.numel} elements",
            where=local.regions[0].name,
        )
    return main.detach().view(-1)


def _entries(tree: Any) -> Iterator[Any]:
    """The leaves of a sharded state dict that describe tensors (ShardedTensor and ShardedTensorFactory)."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _entries(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _entries(value)
    elif hasattr(tree, "global_offset") and hasattr(tree, "local_shape") or hasattr(tree, "build_fn"):
        yield tree


def _described(entry: Any) -> LiveParameter:
    if not hasattr(entry, "build_fn"):
        region, tensor = _region(entry)
        return LiveParameter(entry.data, (region,), {tensor.name: tensor}, bool(entry.allow_shape_mismatch))
    # A factory cuts the parameter into parts with places of their own (SwiGLU gate and up, Mamba's in_proj). Built
    # over a tensor without memory, the parts' offsets in its storage tell which part lies where.
    ghost = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
    parts = sorted(
        _entries(entry.build_fn(entry.key, ghost, entry.replica_id, entry.flattened_range)),
        key=lambda part: int(part.data.storage_offset()),
    )
    end = 0
    for part in parts:
        if part.data.storage_offset() != end or not part.data.is_contiguous():
            raise UnsupportedCheckpointError(
                "a parameter is stored in parts that are no contiguous rows of it", where=str(entry.key)
            )
        end += part.data.numel()
    described = [_region(part) for part in parts]
    tensors = {tensor.name: tensor for _, tensor in described}
    return LiveParameter(entry.data, tuple(region for region, _ in described), tensors, may_pad=False)


def _region(sharded: Any) -> tuple[Region, LogicalTensor]:
    """A ShardedTensor's place in model space."""
    stacked = stacked_axes(sharded.key)
    sizes = (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)
    name = name_at(sharded.key, sharded.global_offset[:stacked])
    dtype = str(sharded.dtype).removeprefix("torch.")
    region = Region(name, tuple(sharded.global_offset[stacked:]), sizes[stacked:])
    return region, LogicalTensor(name, tuple(sharded.global_shape[stacked:]), dtype)
