"""Copies weights and optimizer state of a job, named by Megatron's own sharded state dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from mcore_ckpt_ext.selftest.state import WEIGHT, Piece, State

_SETTINGS = ("step", "lr", "weight_decay", "wd_mult")


def live_state(chunks: Iterable[Any], optimizer: Any, scheduler: Any, arguments: Any) -> State:
    """Copy this rank's state.

    Args:
        chunks: the model chunks, without their wrappers.
        optimizer: a DistributedOptimizer, or a chain of them.
        scheduler: the learning rate scheduler.
        arguments: the arguments of the job, which count iterations and samples.
    """
    shards = _shards(chunks)
    state = State(
        progress={
            "iteration": arguments.iteration,
            "consumed_train_samples": arguments.consumed_train_samples,
            "scheduler": scheduler.state_dict(),
        }
    )
    for sharded in shards.values():
        state.pieces += [_piece(WEIGHT, part, None) for part in _parts(sharded, sharded.data.detach())]
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter in part.model_param_group_index_map:
            sharded = shards[_place(parameter)]
            tensors, settings = _optimizer_state(part, parameter)
            state.pieces += _optimizer_pieces(part, parameter, sharded, tensors)
            state.settings[sharded.key] = settings
    return state


def _shards(chunks: Iterable[Any]) -> dict[tuple[int, int], Any]:
    """Return Megatron's description of each parameter, by its place in memory.

    The description's tensor is the parameter, or a view of it (`make_sharded_tensors_for_checkpoint`,
    megatron/core/transformer/utils.py, core_v0.16.1 to 0.19.2).

    Raises:
        RuntimeError: Megatron does not describe a parameter.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    shards: dict[tuple[int, int], Any] = {}
    for chunk in chunks:
        described = {
            _place(value.data): value
            for value in nested_values(chunk.sharded_state_dict())
            if isinstance(value, (ShardedTensor, ShardedTensorFactory)) and value.data is not None
        }
        for name, parameter in chunk.named_parameters():
            if _place(parameter) not in described:
                raise RuntimeError(f"Megatron's sharded_state_dict does not hold the parameter {name}")
            shards[_place(parameter)] = described[_place(parameter)]
    return shards


def _place(tensor: Any) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _parts(sharded: Any, values: torch.Tensor) -> Iterator[Any]:
    """Yield ShardedTensors for values shaped as the parameter; for gated layers a factory makes several."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(sharded, ShardedTensorFactory):
        yield from nested_values(replace(sharded, data=values).build())
    else:
        yield replace(sharded, data=values, dtype=values.dtype)


def _piece(kind: str, part: Any, held: torch.Tensor | None) -> Piece:
    return Piece(
        kind=kind,
        key=part.key,
        shape=tuple(part.global_shape),
        offset=tuple(part.global_offset),
        prepended=part.prepend_axis_num,
        values=part.data.cpu().clone(),
        held=held,
    )


def _optimizer_pieces(part: Any, parameter: Any, sharded: Any, tensors: dict[str, torch.Tensor]) -> Iterator[Piece]:
    """Yield the master and the moments of the elements that this data-parallel rank owns."""
    owned = part._get_model_param_range_map(parameter)["param"]
    span = slice(owned.start, owned.end)
    held = torch.zeros(parameter.numel(), dtype=torch.bool)
    held[span] = True
    held_parts = [shard.data.clone() for shard in _parts(sharded, held.view(parameter.shape))]
    for kind, tensor in tensors.items():
        values = torch.zeros(parameter.numel(), dtype=tensor.dtype)
        values[span] = tensor.detach().cpu().flatten()
        of_kind = _parts(sharded, values.view(parameter.shape))
        yield from (_piece(kind, shard, here) for shard, here in zip(of_kind, held_parts, strict=True))


def _optimizer_state(part: Any, parameter: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the state tensors of a parameter, and the options of its group.

    torch's Adam counts steps in a tensor for each parameter, the fused ones in the group
    (`DistributedOptimizer._get_main_param_and_optimizer_states`, core_v0.16.1 to 0.19.2).
    """
    tensors = dict(part._get_main_param_and_optimizer_states(parameter))
    counted = {"step": tensors.pop("step")} if "step" in tensors else {}
    index, _ = part.model_param_group_index_map[parameter]
    group = {**part.optimizer.param_groups[index], **counted}
    return tensors, {name: float(group[name]) for name in _SETTINGS if group.get(name) is not None}
