"""Plans and performs the request of Megatron's `torch_dist` loader, reading into the tensors.

Each tensor itself describes which part of which array it holds (`ShardedTensor`,
megatron/core/dist_checkpointing/mapping.py, core_v0.7.0 to 0.19.2). The module imports nothing of Megatron: the caller
passes the objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from mcore_ckpt_ext.devices import holds_data
from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.formats.stored_arrays import StoredArrays
from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint
from mcore_ckpt_ext.megatron.live.broadcast_read import ReadOnce, wanted_bytes
from mcore_ckpt_ext.model_space.names import is_extra_state, name_at, name_in, stacked_axes
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.plan import ITEM_SIZE, TargetSlice, make_plan
from mcore_ckpt_ext.planning.read_dedup import Spans
from mcore_ckpt_ext.storage.index_entries import StoredArray

_KIND = "array"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def with_stored_key(entry: Any, checkpoint: TorchDistCheckpoint) -> Any:
    """Return a ShardedTensor with the checkpoint's key, which differs if another layer spec wrote it."""
    key = name_in(checkpoint.index.arrays, entry.key)
    return entry if key == entry.key else replace(entry, key=key)


def missing_extra_states(requested: Sequence[Any], checkpoint: TorchDistCheckpoint) -> list[Any]:
    """Return the ShardedObjects for extra states of modules that have none in the checkpoint.

    Modules of Transformer Engine request them; the local spec never writes any. Such a module accepts None, as from an
    old checkpoint (`set_extra_state`, transformer_engine/pytorch/module/base.py, 2.13 to 2.20.2).
    """
    stored = {_name_of_object(key) for key in checkpoint.index.objects if is_extra_state(key.partition("/")[0])}
    return [
        entry
        for entry in requested
        if is_extra_state(entry.key)
        and name_at(entry.key, entry.global_offset[: stacked_axes(entry.key)]) not in stored
    ]


def _name_of_object(unique_key: str) -> str:
    """Return the model-space name of an object by its unique key, such as `<key>/shard_3_4`."""
    key, _, shard = unique_key.partition("/shard_")
    offsets = [int(number) for number in shard.partition("_")[0].split(".") if number.isdecimal()]
    return name_at(key, offsets) if len(offsets) >= stacked_axes(key) else key


def check_objects(requested: Sequence[Any], checkpoint: TorchDistCheckpoint) -> None:
    """Find the damaged ShardedObject that Megatron could not load; torch's error does not name it.

    Raises:
        UnreadableCheckpointError: an object is damaged; the error names it.
    """
    for entry in requested:
        if entry.unique_key in checkpoint.index.objects:
            _check_object(entry.unique_key, checkpoint)


def _check_object(key: str, checkpoint: TorchDistCheckpoint) -> None:
    try:
        checkpoint.object(key)
    except UnreadableCheckpointError as error:
        place = checkpoint.index.objects[key]
        where = f"{key}, byte {place.offset} of {checkpoint.folder / place.file}"
        message = "a pickled object of the checkpoint is damaged"
        raise UnreadableCheckpointError(message, found=error.found, where=where) from error


def unsupported_reason(requested: Sequence[Any], checkpoint: TorchDistCheckpoint) -> str | None:
    """Return why Megatron's own loader has to read these tensors; None if this package can."""
    arrays = checkpoint.index.arrays
    for key in dict.fromkeys(entry.key for entry in requested):
        if key not in arrays:
            return f"{key} is not in the checkpoint"
        if key in checkpoint.index.natural_shapes:
            return f"{key} is stored in another shape"
        if key in checkpoint.index.overlapping:
            return f"the chunks of {key} overlap"
    traits = ((entry.key, trait) for entry in requested for trait in _peculiarities(entry, arrays[entry.key]))
    return next((f"{key} is {trait}" for key, trait in traits), None)


def _peculiarities(entry: Any, array: StoredArray) -> Iterator[str]:
    data = entry.data
    dtype = str(entry.dtype).removeprefix("torch.")
    if entry.flattened_range is not None:
        yield "requested in flattened parts"
    elif not _fits(tuple(entry.global_shape), array.shape, bool(entry.allow_shape_mismatch)):
        yield f"of shape {tuple(entry.global_shape)}, in the checkpoint of {array.shape}"
    elif not _lies_within(entry):
        yield "requested beyond its end"
    elif dtype not in ITEM_SIZE:
        yield f"of {dtype}"
    elif data is not None and (type(data) not in _PLAIN or data.layout is not torch.strided):
        yield f"not a plain tensor, but a {type(data).__name__}"
    elif data is not None and not holds_data(data.device):
        yield f"on the device {data.device}"
    elif data is not None and (data.dtype, tuple(data.shape)) != (entry.dtype, tuple(entry.local_shape)):
        described = f"{entry.dtype} of shape {tuple(entry.local_shape)}"
        yield f"described as {described}, and its data is {data.dtype} of shape {tuple(data.shape)}"


def _fits(requested: tuple[int, ...], stored: tuple[int, ...], may_pad: bool) -> bool:
    return requested == stored or (may_pad and len(requested) == len(stored) > 0 and requested[1:] == stored[1:])


def _lies_within(entry: Any) -> bool:
    places = zip(entry.global_offset, _sizes(entry), entry.global_shape, strict=True)
    return all(0 <= offset <= offset + size <= length for offset, size, length in places)


def _sizes(entry: Any) -> tuple[int, ...]:
    return (*(1,) * entry.prepend_axis_num, *entry.local_shape)


class ShardedLoad:
    """A planned load; nothing is changed before `read`."""

    def __init__(self, requested: Sequence[Any], checkpoint: TorchDistCheckpoint) -> None:
        """Plan the load and check every record.

        Args:
            requested: ShardedTensors that `unsupported_reason` accepts.
            checkpoint: the checkpoint that holds them.

        Raises:
            ModelMismatchError: an array has a hole.
            UnreadableCheckpointError: a record contradicts the index.
        """
        self._requested = requested
        self._transfer = checkpoint.files.transfer
        self._plan = make_plan([_target_slice(entry) for entry in requested], StoredArrays(checkpoint.index.arrays))
        self._reader = checkpoint.files.reader
        self._once: ReadOnce | None = None
        self._payloads = [self._transfer.locate(read.extent) for read in self._plan.reads]

    @property
    def is_quantized(self) -> bool:
        """True if something is stored as fp8 numbers: then Megatron has to load it."""
        return any(payload.scaled is not None for payload in self._payloads)

    @property
    def bytes_read(self) -> int:
        """Number of tensor bytes that this rank reads."""
        return self._plan.bytes_read

    def wanted_bytes(self) -> Spans:
        """Return the byte ranges that this rank needs, which `share` takes from all ranks."""
        return wanted_bytes(self._plan, self._transfer)

    def share(self, wants: Sequence[Spans]) -> None:
        """Make `read` collective: one rank reads data that several ranks need.

        Args:
            wants: `wanted_bytes` of every rank.
        """
        self._once = ReadOnce(self._plan, self._reader, self._transfer, wants)

    def read(self) -> list[torch.Tensor]:
        """Fill the tensors.

        Returns:
            The tensors, in the order of the request, detached from their gradients.

        Raises:
            UnreadableCheckpointError: a file is damaged; some elements may have been written.
        """
        with torch.no_grad(), nullcontext() if self._once is None else self._once.taking_part():
            tensors = [_tensor(entry) for entry in self._requested]
            places = [tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous() for tensor in tensors]
            memory = [place.view(-1) for place in places]
            if self._once is None:
                self._transfer.execute(self._plan, memory)
            else:
                self._once.execute(memory)
            for tensor, place in zip(tensors, places, strict=True):
                if place is not tensor:
                    tensor.copy_(place)
        return tensors


def _target_slice(entry: Any) -> TargetSlice:
    region = Region(entry.key, tuple(entry.global_offset), _sizes(entry))
    dtype = str(entry.dtype).removeprefix("torch.")
    tensor = LogicalTensor(entry.key, tuple(entry.global_shape), dtype)
    return TargetSlice(_KIND, Slice.whole((region,)), {entry.key: tensor}, bool(entry.allow_shape_mismatch))


def _tensor(entry: Any) -> torch.Tensor:
    """Return the memory to fill; a tensor without data is allocated on the CPU, as Megatron does."""
    if entry.data is None:
        entry.init_data("cpu")
    tensor: torch.Tensor = entry.data.detach()
    return tensor
