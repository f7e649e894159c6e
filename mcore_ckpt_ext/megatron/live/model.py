"""Describes Megatron's live model as slices of model space.

Attributes used, present from core_v0.7.0 to 0.19.2: `sharded_state_dict` of the model chunks, and the attributes of its
entries (megatron/core/dist_checkpointing/mapping.py). The module imports nothing of Megatron: the caller passes the
objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.layout.master_check import WITHIN_FP4, WITHIN_FP8, MasterCheck, smallest_step
from mcore_ckpt_ext.megatron.trees import leaves
from mcore_ckpt_ext.model_space.names import name_at, stacked_axes
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.model_space.tensors import LogicalTensor

Chunks = Sequence[Any]
"""The model chunks of this rank, without wrappers for precision and gradients."""


@dataclass(frozen=True)
class LiveParameter:
    """A live parameter: its regions in the order of its memory, and the global tensors they belong to."""

    parameter: torch.Tensor
    regions: tuple[Region, ...]
    tensors: Mapping[str, LogicalTensor]
    may_pad: bool


def quantization_check(parameter: torch.Tensor) -> MasterCheck | None:
    """Return the comparison for masters of an fp8 or fp4 live parameter; None for a plain tensor.

    Transformer Engine's quantized tensors show a high-precision dtype, and can dequantize themselves
    (`QuantizedTensor`, transformer_engine/pytorch/quantized_tensor.py, 2.1 to 2.20.2; `NVFP4Tensor` since 2.8). A
    tensor with a single scale keeps it as `_scale_inv` (`Float8Tensor`, float8_tensor.py).
    """
    kind = type(parameter)
    if kind.dequantize is torch.Tensor.dequantize:
        return None
    scale = getattr(parameter, "_scale_inv", None)
    step = 0.0 if scale is None else smallest_step(torch.float8_e4m3fn, float(scale))
    return (WITHIN_FP4 if "FP4" in kind.__name__ else WITHIN_FP8).with_step(step)


NameFunction = Callable[[str], str]
"""Maps a model-space name to the name in a checkpoint."""

NEW = "new."
"""Prefix of parameters that the checkpoint's model does not have; they keep their initialization."""


def model_tensors(chunks: Chunks, spell: NameFunction = str) -> list[LiveParameter]:
    """Return all parameters and buffers in the sharded state dicts of the model chunks."""
    return [_describe(entry, spell) for entry in _stored_tensors(chunks) if isinstance(entry.data, torch.Tensor)]


def live_parameters(chunks: Chunks, spell: NameFunction = str) -> dict[int, LiveParameter]:
    """Return all parameters and buffers of the chunks by `id`, described by their sharded state dicts."""
    held = _tensor_ids(chunks)
    return {id(entry.data): _describe(entry, spell) for entry in _stored_tensors(chunks) if id(entry.data) in held}


def parameters_as_named(chunks: Chunks) -> dict[int, LiveParameter]:
    """Return the parameters of the chunks by `id`, each whole and under its own name there.

    Unlike `live_parameters`, it makes no sharded state dict.
    """
    return {
        id(parameter): LiveParameter(parameter, (Region.whole(name, tuple(parameter.shape)),), {}, may_pad=False)
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    }


def held_among(stored: Iterable[LiveParameter], chunks: Chunks) -> dict[int, LiveParameter]:
    """Return the live parameters among the results of `model_tensors`, by `id`."""
    held = _tensor_ids(chunks)
    return {id(live.parameter): live for live in stored if id(live.parameter) in held}


def _stored_tensors(chunks: Chunks) -> Iterator[Any]:
    """Yield the descriptions of tensors in the sharded state dicts of the chunks."""
    entries = (entry for chunk in chunks for entry in _entries(_sharded_state_dict(chunk)))
    return (entry for entry in entries if getattr(entry, "data", None) is not None)


def _tensor_ids(chunks: Chunks) -> set[int]:
    return {id(tensor) for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())}


def live_names(stored: Iterable[LiveParameter]) -> list[str]:
    """Return the model-space names of tensors."""
    return list(dict.fromkeys(name for live in stored for name in live.tensors))


def registered_names(chunk: Any, live: Mapping[int, LiveParameter]) -> list[str]:
    """Return the names of a chunk's parameters in registration order."""
    return [live[id(parameter)].regions[0].name for parameter in chunk.parameters() if id(parameter) in live]


def trained_names(chunks: Chunks, live: Mapping[int, LiveParameter]) -> list[str]:
    """Return the model-space names of everything that the chunks' trained parameters hold."""
    trained = (live[id(p)] for chunk in chunks for p in chunk.parameters() if p.requires_grad and id(p) in live)
    return list(dict.fromkeys(name for parameter in trained for name in parameter.tensors))


def _sharded_state_dict(chunk: Any) -> Any:
    """Return a chunk's sharded state dict, made with the chunk's own process groups if it has any.

    Without these, `ensure_metadata_has_dp_cp_group` uses `parallel_state` (megatron/core/transformer/utils.py,
    core_v0.16.0 to 0.19.2), which has no groups if a program creates all groups itself.
    """
    given = getattr(getattr(chunk, "pg_collection", None), "dp_cp", None)
    return chunk.sharded_state_dict() if given is None else chunk.sharded_state_dict(metadata={"dp_cp_group": given})


def _entries(tree: Any) -> Iterator[Any]:
    """Yield the ShardedTensors and ShardedTensorFactories of a sharded state dict."""
    for leaf in leaves(tree):
        if hasattr(leaf, "global_offset") and hasattr(leaf, "local_shape") or hasattr(leaf, "build_fn"):
            yield leaf


def _describe(entry: Any, spell: NameFunction) -> LiveParameter:
    if not hasattr(entry, "build_fn"):
        region, tensor = _region(entry, spell)
        return LiveParameter(entry.data, (region,), {tensor.name: tensor}, bool(entry.allow_shape_mismatch))
    # A factory splits the parameter into parts with their own places (SwiGLU gate and up, Mamba's in_proj). Built over
    # a tensor without memory, the parts' storage offsets show which part lies where.
    ghost = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
    parts = sorted(
        _entries(entry.build_fn(entry.key, ghost, entry.replica_id, entry.flattened_range)),
        key=lambda part: int(part.data.storage_offset()),
    )
    end = 0
    for part in parts:
        if part.data.storage_offset() != end or not part.data.is_contiguous():
            raise UnsupportedCheckpointError(
                "a parameter is stored in parts that are not contiguous rows", where=str(entry.key)
            )
        end += part.data.numel()
    described = [_region(part, spell) for part in parts]
    tensors = {tensor.name: tensor for _, tensor in described}
    return LiveParameter(entry.data, tuple(region for region, _ in described), tensors, may_pad=False)


def _region(sharded: Any, spell: NameFunction) -> tuple[Region, LogicalTensor]:
    """Return a ShardedTensor's place in model space."""
    stacked = stacked_axes(sharded.key)
    sizes = (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)
    name = spell(name_at(sharded.key, sharded.global_offset[:stacked]))
    dtype = str(sharded.dtype).removeprefix("torch.")
    region = Region(name, tuple(sharded.global_offset[stacked:]), sizes[stacked:])
    return region, LogicalTensor(name, tuple(sharded.global_shape[stacked:]), dtype)
