"""What Megatron's loader of `torch_dist` is asked for, planned and read by this package, straight into its place.

Each tensor says itself which part of which array it is to hold (`ShardedTensor`,
megatron/core/dist_checkpointing/mapping.py, core_v0.7.0 to 0.19.2). Nothing is imported: the caller hands over the
objects.
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
from mcore_ckpt_ext.model_space.names import is_extra_state, name_at, renamed_as_in, stacked_axes
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.plan import ITEM_SIZE, TargetSlice, make_plan
from mcore_ckpt_ext.planning.read_dedup import Spans
from mcore_ckpt_ext.storage.index_entries import StoredArray

_KIND = "array"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def respelled(entry: Any, checkpoint: TorchDistCheckpoint) -> Any:
    """A ShardedTensor under the key that the checkpoint has for it, which another layer spec may have written."""
    key = renamed_as_in(checkpoint.index.arrays, entry.key)
    return entry if key == entry.key else replace(entry, key=key)


def extra_states_of_nobody(asked: Sequence[Any], checkpoint: TorchDistCheckpoint) -> list[Any]:
    """The ShardedObjects for extra states of modules that the checkpoint has none of, under no key.

    Modules of Transformer Engine ask for them, those of the local spec never wrote any. None is what such a module
    takes for an old checkpoint (`set_extra_state`, transformer_engine/pytorch/module/base.py, 2.13 to 2.20.2).
    """
    stored = {_name_of_object(key) for key in checkpoint.index.objects if is_extra_state(key.partition("/")[0])}
    return [
        entry
        for entry in asked
        if is_extra_state(entry.key)
        and name_at(entry.key, entry.global_offset[: stacked_axes(entry.key)]) not in stored
    ]


def _name_of_object(unique_key: str) -> str:
    """The model-space name of `decoder.layers.mlp.linear_fc1._extra_state/shard_3_4` (`ShardedObject.unique_key`)."""
    key, _, shard = unique_key.partition("/shard_")
    offsets = [int(number) for number in shard.partition("_")[0].split(".") if number.isdecimal()]
    return name_at(key, offsets) if len(offsets) >= stacked_axes(key) else key


def check_objects(asked: Sequence[Any], checkpoint: TorchDistCheckpoint) -> None:
    """Look at ShardedObjects that Megatron could not load: torch says what it stumbled over, not where that lies.

    Raises:
        UnreadableCheckpointError: one is damaged; it says which.
    """
    for entry in asked:
        if entry.unique_key in checkpoint.index.objects:
            _check_object(entry.unique_key, checkpoint)


def _check_object(key: str, checkpoint: TorchDistCheckpoint) -> None:
    try:
        checkpoint.object(key)
    except UnreadableCheckpointError as error:
        place = checkpoint.index.objects[key]
        where = f"{key}, byte {place.offset} of {checkpoint.folder / place.file}"
        what = "a pickled object of the checkpoint is damaged"
        raise UnreadableCheckpointError(what, found=error.found, where=where) from error


def stumbling_block(asked: Sequence[Any], checkpoint: TorchDistCheckpoint) -> str | None:
    """Why Megatron's own loader had better read these tensors; None where this package knows all that they ask for."""
    arrays = checkpoint.index.arrays
    for key in dict.fromkeys(entry.key for entry in asked):
        if key not in arrays:
            return f"{key} is not in the checkpoint"
        if key in checkpoint.index.natural_shapes:
            return f"{key} is stored in another shape"
        if key in checkpoint.index.overlapping:
            return f"the chunks of {key} overlap"
    found = ((entry.key, what) for entry in asked for what in _peculiarities(entry, arrays[entry.key]))
    return next((f"{key} is {what}" for key, what in found), None)


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
        yield f"{data.dtype} of shape {tuple(data.shape)}, and says otherwise"


def _fits(wanted: tuple[int, ...], stored: tuple[int, ...], may_pad: bool) -> bool:
    return wanted == stored or (may_pad and len(wanted) == len(stored) > 0 and wanted[1:] == stored[1:])


def _lies_within(entry: Any) -> bool:
    places = zip(entry.global_offset, _sizes(entry), entry.global_shape, strict=True)
    return all(0 <= offset <= offset + size <= length for offset, size, length in places)


def _sizes(entry: Any) -> tuple[int, ...]:
    return (*(1,) * entry.prepend_axis_num, *entry.local_shape)


class ShardedLoad:
    """A planned load; nothing is touched before `read`."""

    def __init__(self, asked: Sequence[Any], checkpoint: TorchDistCheckpoint) -> None:
        """Plan, and look at every record.

        Args:
            asked: ShardedTensors without a stumbling block.
            checkpoint: what holds them.

        Raises:
            ModelMismatchError: an array has a hole.
            UnreadableCheckpointError: a record is not what the index describes.
        """
        self._asked = asked
        self._transfer = checkpoint.transfer
        self._plan = make_plan([_wanted(entry) for entry in asked], StoredArrays(checkpoint.index.arrays))
        self._reader = checkpoint.reader
        self._once: ReadOnce | None = None
        self._payloads = [self._transfer.locate(copy.extent) for copy in self._plan.copies]

    @property
    def is_quantized(self) -> bool:
        """Whether something is stored as fp8 numbers: then Megatron decides what becomes of them."""
        return any(payload.scaled is not None for payload in self._payloads)

    @property
    def bytes_read(self) -> int:
        """Payload bytes."""
        return self._plan.bytes_read

    def wanted_bytes(self) -> Spans:
        """What this rank wants, to be told to all; errors as of `wanted_bytes`."""
        return wanted_bytes(self._plan, self._transfer)

    def share(self, wants: Sequence[Spans]) -> None:
        """From now on, `read` is collective: what several ranks want is read by one.

        Args:
            wants: `wanted_bytes` of every rank.
        """
        self._once = ReadOnce(self._plan, self._reader, self._transfer, wants)

    def read(self) -> list[torch.Tensor]:
        """Fill the tensors.

        Returns:
            Them, in the order in which they were asked for, without their gradients.

        Raises:
            UnreadableCheckpointError: a file is damaged; some elements may have been written.
        """
        with torch.no_grad(), nullcontext() if self._once is None else self._once.taking_part():
            tensors = [_tensor(entry) for entry in self._asked]
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


def _wanted(entry: Any) -> TargetSlice:
    region = Region(entry.key, tuple(entry.global_offset), _sizes(entry))
    dtype = str(entry.dtype).removeprefix("torch.")
    tensor = LogicalTensor(entry.key, tuple(entry.global_shape), dtype)
    return TargetSlice(_KIND, Slice.whole((region,)), {entry.key: tensor}, bool(entry.allow_shape_mismatch))


def _tensor(entry: Any) -> torch.Tensor:
    """The memory to fill: a tensor that is not there yet is made on the processor, as Megatron does."""
    if entry.data is None:
        entry.init_data("cpu")
    tensor: torch.Tensor = entry.data.detach()
    return tensor
