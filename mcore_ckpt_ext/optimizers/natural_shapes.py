"""Derives natural shapes of optimizer arrays stored reshaped, if the index lacks them.

Megatron 0.8 to 0.14 add them to torch's index as an attribute that is no field of its class
(`MCoreSavePlanner.create_global_plan`, megatron/core/dist_checkpointing/strategies/torch.py), and torch 2.9 to 2.11
write a copy of the index, which has only the fields (`_FileSystemWriter.finish`, torch/distributed/checkpoint/
filesystem.py). Megatron 0.15 declares a field, `MCoreMetadata.mcore_data`, which is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.model_space.names import name_at, stacked_axes

Shape = tuple[int, ...]
_WITH_WEIGHTS = "pass the folder of the weights: --weights FOLDER; or "


def natural_shape(key: str, stored: Shape, weight_shape: Callable[[str], Shape | None]) -> Shape | None:
    """Return the natural shape of an optimizer array; None if it is stored in this shape.

    An array is stored as [shards along each axis, elements of a shard] (`apply_nd_flattened_tensors_reformulation`,
    megatron/core/dist_checkpointing/strategies/resharding.py, core_v0.8.0 to 0.15.3). Up to 0.10, arrays of one axis
    are not reshaped. The state of a weight has the weight's sharding and global shape
    (`sharded_param_state_fs_model_space`, megatron/core/optimizer/distrib_optimizer.py).

    Args:
        key: the sharded key of the weight.
        stored: the stored shape of the array.
        weight_shape: returns the shape of a weight by its name in model space; None if it is unknown.

    Raises:
        UnsupportedCheckpointError: the weight is unknown, or its shape does not fit.
    """
    if len(stored) < 2:
        return None
    stacked = stacked_axes(key)
    shape = weight_shape(name_at(key, (0,) * stacked))
    if shape is None:
        raise _missing_shapes(key, f"an array of shape {stored}, and no weight", _WITH_WEIGHTS)
    if len(stored) == stacked + len(shape):
        return None
    natural = _natural(stored, stacked, shape)
    if natural is None or weight_shape(name_at(key, [size - 1 for size in natural[:stacked]])) != shape:
        raise _missing_shapes(key, f"an array of shape {stored}, which fits no sharding of the weight's shape {shape}")
    return natural


def natural_shapes(
    arrays: Mapping[str, tuple[str, Shape]], weight_shape: Callable[[str], Shape | None]
) -> dict[str, Shape]:
    """Return the natural shapes of those arrays that are stored reshaped.

    Args:
        arrays: the weight's sharded key and the stored shape of each array.
        weight_shape: see `natural_shape`.

    Raises:
        UnsupportedCheckpointError: see `natural_shape`.
    """
    shapes = {name: natural_shape(key, stored, weight_shape) for name, (key, stored) in arrays.items()}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _natural(stored: Shape, stacked: int, shape: Shape) -> Shape | None:
    """Return the natural shape of an array; the last stacked axis may have several elements in a shard."""
    *shards, numel = stored
    within = shards[stacked:]
    if len(within) != len(shape) or any(count < 1 or size % count for size, count in zip(shape, within, strict=True)):
        return None
    local = prod(size // count for size, count in zip(shape, within, strict=True))
    together, rest = divmod(numel, local) if local else (0, 1)
    if rest or together < 1 or (together > 1 and not stacked):
        return None
    stacks = shards[:stacked]
    if stacked:
        stacks[-1] *= together
    return (*stacks, *shape)


def _missing_shapes(key: str, description: str, instead: str = "") -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        "the index lacks the natural shapes of the optimizer state, which torch 2.9 to 2.11 do not write for "
        "Megatron before 0.15",
        found=description,
        where=key,
        hint=f"{instead}save it again with another release of torch; or go on without the optimizer: "
        "--no-load-optim in a job, --drop optimizer in a conversion",
    )
