"""Gathers a tensor-parallel parameter from the slices of all ranks, and slices it again.

ColossalAI (0.3.4 to 0.5.1) marks a sharded parameter in two ways: by a ``dist_layout`` (tensor/d_tensor/api.py), or by
a pair of functions ``shard_fn`` and ``gather_fn`` if the slice is not contiguous (GPT-2's fused QKV). A vocabulary that
cannot be divided evenly is padded first (tensor/padded_tensor/api.py); the layout then includes the padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return True if this rank holds only a slice of the parameter."""
    return hasattr(parameter, "dist_layout") or hasattr(parameter, "shard_fn")


def groups(parameters: Iterable[Any]) -> list[Any]:
    """Return this rank's groups of tensor parallelism, in an order that is the same on all ranks.

    A layout names its groups; a pair of functions has its group in their closure (0.5.0,
    shardformer/layer/qkv_fused_linear.py).
    """
    unique: dict[Any, None] = {}
    for parameter in parameters:
        if hasattr(parameter, "dist_layout"):
            unique.update(dict.fromkeys(parameter.dist_layout.device_mesh.get_process_group_for_all_axes().values()))
        elif hasattr(parameter, "gather_fn"):
            cells = (cell.cell_contents for cell in parameter.gather_fn.__closure__ or ())
            held = [getattr(content, "process_group", content) for content in cells]
            unique.update(dict.fromkeys(group for group in held if isinstance(group, dist.ProcessGroup)))
    return list(unique)


def whole_shape(parameter: Any) -> torch.Size:
    """Return the shape of the parameter without tensor parallelism and without padding."""
    shape = list(_padded_shape(parameter))
    if hasattr(parameter, "_padding_dim"):
        shape[parameter._padding_dim] = parameter._origin_length
    return torch.Size(shape)


class Room(NamedTuple):
    """Buffers to gather one parameter among tensor-parallel ranks; gathering allocates nothing else.

    Args:
        group: these ranks.
        dimension: the dimension along which the parameter is sliced.
        held: the indices along that dimension that this rank holds, int64.
        held_by: receives the indices of each rank.
        slices: receives the slice of each rank, in the parameter's local shape.
        padded: receives the whole value, with its padding.
    """

    group: Any
    dimension: int
    held: torch.Tensor
    held_by: list[torch.Tensor]
    slices: list[torch.Tensor]
    padded: torch.Tensor


def room_for(parameter: Any, dtype: torch.dtype, device: torch.device) -> Room | None:
    """Allocate the buffers to gather a parameter, or state that is sharded like it.

    Sharding the indices like the parameter shows which elements a rank holds.

    Args:
        parameter: the parameter, with its sharding and padding.
        dtype: the dtype of the values.
        device: a device that the group's backend can reach.

    Returns:
        The buffers, or None if each rank holds the whole parameter.

    Raises:
        UnsupportedCheckpointError: the parameter is sliced along two dimensions.
    """
    shape = _padded_shape(parameter)
    cut = [dimension for dimension, size in enumerate(shape) if parameter.shape[dimension] != size]
    if not cut:
        return None
    process_groups = groups([parameter])
    if len(cut) > 1 or len(process_groups) != 1:
        raise UnsupportedCheckpointError(
            "a parameter is sharded along several dimensions, or by several groups",
            found=f"local shape {tuple(parameter.shape)} of {tuple(shape)}, {quantity(len(process_groups), 'group')}",
            expected="one dimension, and one group",
        )
    (dimension,) = cut
    along = [1] * len(shape)
    along[dimension] = shape[dimension]
    numbers = _cut(parameter, torch.arange(shape[dimension]).view(along)).reshape(-1).to(device)
    size = dist.get_world_size(process_groups[0])
    return Room(
        process_groups[0],
        dimension,
        numbers,
        [torch.empty_like(numbers) for _ in range(size)],
        [torch.empty(parameter.shape, dtype=dtype, device=device) for _ in range(size)],
        torch.empty(shape, dtype=dtype, device=device),
    )


def whole(parameter: Any, local: torch.Tensor, room: Room | None) -> torch.Tensor:
    """Gather the whole value from the slices of all tensor-parallel ranks, which must all call this.

    Args:
        parameter: the parameter, with its sharding and padding.
        local: this rank's values, contiguous, in the parameter's local shape.
        room: made by `room_for`, for the dtype and device of the values; afterwards it has the input of `padding_of`.
    """
    if room is not None:
        dist.all_gather(room.held_by, room.held, group=room.group)
        dist.all_gather([as_bytes(piece) for piece in room.slices], as_bytes(local.detach()), group=room.group)
        for held, piece in zip(room.held_by, room.slices, strict=True):
            room.padded.index_copy_(room.dimension, held, piece)
        local = room.padded
    if hasattr(parameter, "_padding_dim"):
        local = local.narrow(parameter._padding_dim, 0, parameter._origin_length)
    return local


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """View values as bytes, because a backend may not support the dtype."""
    return values.view(-1).view(torch.uint8)


def padding_of(parameter: Any, room: Room | None, local: torch.Tensor) -> torch.Tensor | None:
    """Return the padding rows of the value that `whole` has just gathered; None if it has none."""
    if padding_shape(parameter) is None:
        return None
    padded = local if room is None else room.padded
    dimension = parameter._padding_dim
    begin = parameter._origin_length
    return padded.narrow(dimension, begin, padded.shape[dimension] - begin).detach().to("cpu", copy=True)


def padding_shape(parameter: Any) -> torch.Size | None:
    """Return the shape of a vocabulary's padding rows; None if there are none.

    The optimizer updates them like other rows, and the loss depends on them, but model files omit them.
    """
    if not hasattr(parameter, "_padding_dim"):
        return None
    shape = list(_padded_shape(parameter))
    shape[parameter._padding_dim] -= parameter._origin_length
    return torch.Size(shape) if shape[parameter._padding_dim] else None


def is_padding(parameter: Any) -> torch.Tensor | None:
    """Return a mask of the padding elements in this rank's slice; None if there are no padding rows."""
    if padding_shape(parameter) is None:
        return None
    dimension = parameter._padding_dim
    along = [1] * parameter.dim()
    along[dimension] = -1
    numbers = torch.arange(_padded_shape(parameter)[dimension]).view(along).expand(_padded_shape(parameter))
    cut = _cut(parameter, numbers.contiguous())
    return cut >= int(parameter._origin_length)


def slice_of(parameter: Any, value: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
    """Return this rank's slice of a whole value, in the parameter's local shape.

    Nothing is communicated, and ``value`` is not changed (ColossalAI's own ``to_padded_tensor`` would pad it in place).

    Args:
        parameter: the parameter, with its sharding and padding.
        value: the value without padding.
        padding: the padding rows, of `padding_shape`; None for zeros.
    """
    if hasattr(parameter, "_padding_dim"):
        value = _pad(value, _padded_shape(parameter), parameter._padding_dim, padding)
    return _cut(parameter, value)


def _cut(parameter: Any, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of a whole and padded value, or of its elements' numbers."""
    if hasattr(parameter, "dist_layout"):
        from colossalai.tensor.d_tensor import distribute_tensor

        layout = parameter.dist_layout
        local: torch.Tensor = distribute_tensor(value.view_as(value), layout.device_mesh, layout.sharding_spec)
        return local
    if hasattr(parameter, "shard_fn"):
        return parameter.shard_fn(value)  # type: ignore[no-any-return]
    return value


def _pad(value: torch.Tensor, shape: torch.Size, dimension: int, rows: torch.Tensor | None) -> torch.Tensor:
    if rows is None:
        missing = list(value.shape)
        missing[dimension] = shape[dimension] - value.shape[dimension]
        rows = torch.zeros(missing, dtype=value.dtype, device=value.device)
    return torch.cat((value, rows.to(value)), dim=dimension)


def _padded_shape(parameter: Any) -> torch.Size:
    """Return the shape without tensor parallelism, with the vocabulary's padding."""
    if hasattr(parameter, "dist_layout"):
        return torch.Size(parameter.dist_layout.global_shape)
    if hasattr(parameter, "shard_fn"):
        return _shape_before(parameter)
    return torch.Size(parameter.shape)


def _shape_before(parameter: Any) -> torch.Size:
    """Find the shape that ``shard_fn`` turns into the local one: try shapes on tensors without data."""
    for size in range(1, dist.get_world_size() + 1):
        for dimension in range(parameter.dim()):
            shape = list(parameter.shape)
            shape[dimension] *= size
            try:
                local_shape = parameter.shard_fn(torch.empty(shape, device="meta")).shape
            except (RuntimeError, AssertionError):
                continue
            if local_shape == parameter.shape:
                return torch.Size(shape)
    raise UnsupportedCheckpointError(
        "a parameter is sharded by an unknown function",
        found=f"local shape {tuple(parameter.shape)}, {parameter.shard_fn}",
        expected="a slice of one dimension",
    )
