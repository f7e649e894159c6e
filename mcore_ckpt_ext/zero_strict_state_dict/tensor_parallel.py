"""One parameter under tensor parallelism: from the slice of this rank to the whole, and back.

ColossalAI (0.3.4 to 0.5.1) marks a sharded parameter in two ways: a ``dist_layout`` (tensor/d_tensor/api.py), or a
pair of functions ``shard_fn`` and ``gather_fn`` where the slice is no plain cut (GPT-2's fused QKV). A vocabulary that
does not divide is padded first (tensor/padded_tensor/api.py); the layout then counts the padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt_ext.errors import UnsupportedCheckpointError


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether this rank holds a slice of the parameter only."""
    return hasattr(parameter, "dist_layout") or hasattr(parameter, "shard_fn")


def groups(parameters: Iterable[Any]) -> list[Any]:
    """This rank's groups of tensor parallelism, in an order that is the same on all ranks.

    A layout names its groups; a pair of functions has its group in their closure (0.5.0,
    shardformer/layer/qkv_fused_linear.py).
    """
    found: dict[Any, None] = {}
    for parameter in parameters:
        if hasattr(parameter, "dist_layout"):
            found.update(dict.fromkeys(parameter.dist_layout.device_mesh.get_process_group_for_all_axes().values()))
        elif hasattr(parameter, "gather_fn"):
            cells = (cell.cell_contents for cell in parameter.gather_fn.__closure__ or ())
            held = [getattr(content, "process_group", content) for content in cells]
            found.update(dict.fromkeys(one for one in held if isinstance(one, dist.ProcessGroup)))
    return list(found)


def whole_shape(parameter: Any) -> torch.Size:
    """The shape that the parameter has without tensor parallelism and without padding."""
    shape = list(_padded_shape(parameter))
    if hasattr(parameter, "_padding_dim"):
        shape[parameter._padding_dim] = parameter._origin_length
    return torch.Size(shape)


def whole(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """The whole value from the slices of all tensor-parallel ranks, which must all call this.

    Args:
        parameter: says how it is sharded and padded.
        local: this rank's values, in the parameter's local shape and any dtype.
    """
    if hasattr(parameter, "dist_layout"):
        from colossalai.tensor.d_tensor import init_as_dtensor, to_global

        layout = parameter.dist_layout
        # A view of its own: the layout is set as an attribute, and the methods of the tensor are replaced.
        marked = init_as_dtensor(local.view_as(local), layout.device_mesh, layout.sharding_spec, layout.global_shape)
        local = to_global(marked)
    elif hasattr(parameter, "gather_fn"):
        local = parameter.gather_fn(local)
    if hasattr(parameter, "_padding_dim"):
        local = local.narrow(parameter._padding_dim, 0, parameter._origin_length)
    return local


def slice_of(parameter: Any, value: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a whole value, in the parameter's local shape; padding is zero.

    Nothing is communicated, and ``value`` is not touched (ColossalAI's own ``to_padded_tensor`` would pad it in place).
    """
    if hasattr(parameter, "_padding_dim"):
        value = _padded(value, _padded_shape(parameter), parameter._padding_dim)
    if hasattr(parameter, "dist_layout"):
        from colossalai.tensor.d_tensor import distribute_tensor

        layout = parameter.dist_layout
        local: torch.Tensor = distribute_tensor(value.view_as(value), layout.device_mesh, layout.sharding_spec)
        return local
    if hasattr(parameter, "shard_fn"):
        return parameter.shard_fn(value)  # type: ignore[no-any-return]
    return value


def _padded(value: torch.Tensor, shape: torch.Size, dimension: int) -> torch.Tensor:
    padding_shape = list(value.shape)
    padding_shape[dimension] = shape[dimension] - value.shape[dimension]
    padding = torch.zeros(padding_shape, dtype=value.dtype, device=value.device)
    return torch.cat((value, padding), dim=dimension)


def _padded_shape(parameter: Any) -> torch.Size:
    """The shape without tensor parallelism, vocabulary padding included."""
    if hasattr(parameter, "dist_layout"):
        return torch.Size(parameter.dist_layout.global_shape)
    if hasattr(parameter, "shard_fn"):
        return _shape_before(parameter)
    return torch.Size(parameter.shape)


def _shape_before(parameter: Any) -> torch.Size:
    """The shape that ``shard_fn`` turns into the local one; it is written down nowhere, so shapes without data are
    tried.
    """
    for size in range(1, dist.get_world_size() + 1):
        for dimension in range(parameter.dim()):
            shape = list(parameter.shape)
            shape[dimension] *= size
            try:
                found = parameter.shard_fn(torch.empty(shape, device="meta")).shape
            except (RuntimeError, AssertionError):
                continue
            if found == parameter.shape:
                return torch.Size(shape)
    raise UnsupportedCheckpointError(
        "a parameter is sharded by a function that no whole shape fits",
        found=f"local shape {tuple(parameter.shape)}, {parameter.shard_fn}",
        expected="a slice of one dimension",
    )
