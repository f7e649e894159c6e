"""The entries of a HybridParallelPlugin stage: gathered from the ranks that share it, and sliced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mcore_ckpt_ext.colossalai import padding, tensor_parallel
from mcore_ckpt_ext.colossalai.lost_states import MASTER, PADDING
from mcore_ckpt_ext.colossalai.optimizer import State
from mcore_ckpt_ext.colossalai.shards import keys_of
from mcore_ckpt_ext.colossalai.stand_ins import standing_in
from mcore_ckpt_ext.errors import ModelMismatchError


def whole_state_dict(module: nn.Module) -> Any:
    """Return the state dict of this stage's module with whole parameters; all ranks of a stage call this."""
    values = {}
    for parameter in module.parameters():
        value = _whole(parameter)
        # A parameter that is whole keeps its attributes, which hooks may read.
        if value.data_ptr() != parameter.data_ptr():
            values[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    with standing_in(module, values):
        return module.state_dict()


def entries(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the entries of `whole_state_dict`; all ranks of a stage iterate.

    One tensor is gathered at a time, and has memory of its own for each of its names.
    """
    keys = keys_of(module)
    for tensor, names in keys.tensors.items():
        value = _whole(tensor)
        yield names[0], value
        yield from ((name, value.clone()) for name in names[1:])
    yield from keys.others.items()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole value of a parameter or buffer, in memory that holds nothing else."""
    room = tensor_parallel.room_for(tensor, tensor.dtype, tensor.device)
    value = tensor_parallel.whole(tensor, tensor.detach().contiguous(), room)
    # A file stores a tensor's whole storage.
    is_part = value.numel() * value.element_size() < value.untyped_storage().nbytes()
    return value.clone() if is_part else value


def is_per_element(name: str, value: object, parameter: torch.Tensor) -> bool:
    """Return True if a state has a value for each element of its parameter.

    NAdam and ASGD also keep scalars.
    """
    return isinstance(value, torch.Tensor) and name != "step" and (value.dim() > 0 or parameter.dim() == 0)


def join_shards(value: torch.Tensor, parameter: Any, zero_group: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the whole value of a parameter's state, and its padding rows.

    Args:
        value: this rank's part.
        parameter: the working parameter.
        zero_group: the ranks that share this slice of it, flat, in equal parts; None without ZeRO.
    """
    from colossalai.utils import get_current_device

    value = value.to(get_current_device())
    if zero_group is not None:
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size(zero_group))]
        dist.all_gather(parts, value, group=zero_group)
        value = torch.cat(parts)[: parameter.numel()].view(parameter.shape)
    room = tensor_parallel.room_for(parameter, value.dtype, value.device)
    return tensor_parallel.whole(parameter, value, room), tensor_parallel.padding_of(parameter, room, value)


def refuse_loaded_shapes(key: int, state: State, parameter: Any) -> None:
    """Raise ModelMismatchError if a loaded state of parameter `key` has another shape than that."""
    expected = tensor_parallel.whole_shape(parameter)
    for name, value in state.items():
        if is_per_element(name, value, parameter) and not name.endswith(PADDING) and value.shape != expected:
            raise ModelMismatchError(
                "an optimizer state has another shape than its parameter",
                found=tuple(value.shape),
                expected=tuple(expected),
                where=f"{name} of parameter {key}",
                hint="load a state of the same model and kind of optimizer",
            )


def working_parameter(optimizer: Any, stepped: torch.Tensor) -> Any:
    """Return the working parameter of a tensor that the optimizer steps."""
    of_master = optimizer.get_master_to_working_map()
    return stepped if of_master is None else of_master[id(stepped)]


def local_state(optimizer: Any, stepped: torch.Tensor, state: State) -> State:
    """Return this rank's part of a parameter's state; also write the master's padding rows to the weight."""
    parameter = working_parameter(optimizer, stepped)
    local: State = {}
    rows = padding.fit_padding(parameter, MASTER, state.get(f"{MASTER}{PADDING}"))
    if rows is not None:
        _write_padding(parameter, rows)
    for name, value in state.items():
        if name.endswith(PADDING):
            continue
        if not is_per_element(name, value, parameter):
            local[name] = value
            continue
        rows = padding.fit_padding(parameter, name, state.get(f"{name}{PADDING}"))
        cut = tensor_parallel.slice_of(parameter, value, rows)
        cut = part_here(optimizer, parameter, cut)
        # Moments are kept in the dtype of the stepped tensor, as in ColossalAI.
        local[name] = torch.empty(cut.shape, dtype=stepped.dtype, device=stepped.device).copy_(cut)
    return local


def part(value: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Return this rank's part under ZeRO: flat, padded with zeros, in equal parts.

    Source: ``_create_master_param_current_rank``, zero/low_level/low_level_optim.py, 0.5.0.
    """
    flat = value.reshape(-1)
    flat = nn.functional.pad(flat, [0, -len(flat) % size])
    return flat.view(size, -1)[rank]


def part_here(optimizer: Any, parameter: Any, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter's value, as the optimizer steps it."""
    groups = getattr(optimizer, "param_to_pg", None)  # a LowLevelZeroOptimizer's
    if groups is None:
        return value
    from colossalai.zero.low_level._utils import get_nd_rank, get_nd_world_size

    return part(value, get_nd_world_size(groups[parameter]), get_nd_rank(groups[parameter]))


def _write_padding(parameter: Any, rows: torch.Tensor) -> None:
    """Write the padding rows, which no model file contains, into the weight."""
    whole = torch.zeros(tensor_parallel.whole_shape(parameter), dtype=parameter.dtype)
    given = tensor_parallel.slice_of(parameter, whole, rows).to(parameter.device)
    is_padding = tensor_parallel.is_padding(parameter)
    if is_padding is not None:
        parameter.data.copy_(torch.where(is_padding.to(given.device), given, parameter.data))
