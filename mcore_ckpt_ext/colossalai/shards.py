"""Yields the strict state dict in shards of bounded size: at most a chunk and a shard are in memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from mcore_ckpt_ext.colossalai.asynchronous import pinned_copy
from mcore_ckpt_ext.colossalai.files import refuse_objects
from mcore_ckpt_ext.colossalai.gathering import Gather, own_copy
from mcore_ckpt_ext.colossalai.ranks import GroupErrors
from mcore_ckpt_ext.colossalai.stand_ins import standing_in
from mcore_ckpt_ext.colossalai.state import (
    Precision,
    StateDictOptions,
    Ties,
    begin,
    dtype_of,
    parameter_values,
    precision_of,
)
from mcore_ckpt_ext.colossalai.tensor_parallel import whole_shape
from mcore_ckpt_ext.colossalai.wrapper import inspect_wrapper
from mcore_ckpt_ext.errors import UnsupportedCheckpointError

Shard = tuple["OrderedDict[str, Any]", int]


class Keys(NamedTuple):
    """The keys of the strict state dict, in order: those of tensors, and others with their values."""

    tensors: dict[torch.Tensor, list[str]]
    others: dict[str, Any]


def keys_of(module: nn.Module, prefix: str = "") -> Keys:
    """Collect the keys of a module's state dict, with tensors that only have shapes.

    Raises:
        UnsupportedCheckpointError: a hook makes tensors that are neither parameters nor buffers.
    """
    shapes: dict[torch.Tensor, torch.Tensor] = {}
    for parameter in module.parameters():
        empty = torch.empty(whole_shape(parameter), dtype=parameter.dtype, device="meta")
        shapes[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        shapes[buffer] = torch.empty_like(buffer, device="meta")
    with standing_in(module, {id(tensor): shape for tensor, shape in shapes.items()}):
        state = module.state_dict(prefix=prefix, keep_vars=True)
    live = {id(shape): tensor for tensor, shape in shapes.items()}
    keys = Keys({}, {})
    for key, value in state.items():
        if id(value) in live:
            keys.tensors.setdefault(live[id(value)], []).append(key)
        elif isinstance(value, torch.Tensor) and value.is_meta:
            raise UnsupportedCheckpointError(
                "a state_dict hook, or a module's _save_to_state_dict, computes new values from the whole state dict",
                where=key,
                hint="save unsharded (shard=False), or remove the hook",
            )
        else:
            keys.others[key] = value
    return keys


def iter_zero_strict_state_dict(
    model: Any,
    max_shard_bytes: int,
    *,
    prefix: str = "",
    dtype: Precision | None = None,
    only_rank_0: bool = True,
    device: torch.device | str = "cpu",
    ties: Ties = "share",
) -> Generator[Shard]:
    """Yield the strict state dict in shards, in the order of the chunks.

    All ranks must iterate to the end. Every rank gets the same number of shards; ranks that receive no values get empty
    dicts. A rank that fails with a shard (a full disk) throws its error into the generator, whose ``throw`` then raises
    on it, as the next step does on the others.

    Args:
        model: a ZeroDDP or GeminiDDP.
        max_shard_bytes: a shard is larger only if it is a single tensor.
        prefix: precedes every key.
        dtype: see `zero_strict_state_dict`.
        only_rank_0: see `zero_strict_state_dict`.
        device: the device of the values.
        ties: see `zero_strict_state_dict`; names that share a storage are in the same shard.

    Yields:
        A shard and its size in bytes.

    Raises:
        CheckpointError: on every rank; except for out of memory, before the first shard.
    """
    options = StateDictOptions(precision_of(model, dtype), only_rank_0, device, prefix, ties=ties)
    yield from state_dict_shards(model, max_shard_bytes, options)


def state_dict_shards(
    model: Any, max_shard_bytes: int, options: StateDictOptions, pinned: dict[str, Any] | None = None
) -> Generator[Shard]:
    """Do what `iter_zero_strict_state_dict` does; pinned memory, by key, receives the values if given."""
    # Enumerated twice, because the ranks must also agree that it is possible.
    compared = {"max_shard_bytes": max_shard_bytes, "keys": _digest(model, options.prefix)}
    gather = begin(model, "state_dict_shard", options, "no rank has all shards", compared)
    keys = keys_of(gather.zero.module, options.prefix)
    yield from iter_shards(_entries(gather, keys, options, pinned), max_shard_bytes, gather.errors)


def iter_shards(
    entries: Iterable[tuple[Mapping[Any, Any] | None, int]], max_shard_bytes: int, errors: GroupErrors
) -> Generator[tuple[OrderedDict[Any, Any], int]]:
    """Yield entries in shards, each with its size in bytes; then raise on all ranks if one has failed.

    An error that is thrown into the generator, since a shard could not be written, makes this rank fail.

    Args:
        entries: what belongs together, or None on a rank that has none or has failed, and its size.
        max_shard_bytes: a shard is larger only if it has a single entry with a size.
        errors: the failures of the ranks.
    """
    shard: OrderedDict[Any, Any] = OrderedDict()
    size = 0
    for held, cost in entries:
        if size and cost and size + cost > max_shard_bytes:
            yield from _hand_over(shard, size, errors)
            shard = OrderedDict()
            size = 0
        shard.update(held or {})
        size += cost
    yield from _hand_over(shard, size, errors)
    errors.raise_on_all()


def _hand_over(shard: Any, size: int, errors: GroupErrors) -> Iterator[tuple[Any, int]]:
    """Yield a shard, unless this rank has failed; an error thrown into the generator makes it fail."""
    if errors.failure is None:
        try:
            yield shard, size
        except Exception as error:  # noqa: BLE001 - any error of the consumer has to be reported to the other ranks
            errors.failure = error


def _entries(
    gather: Gather, keys: Keys, options: StateDictOptions, pinned: dict[str, Any] | None
) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Yield the entries of each tensor under its keys, with their size in bytes, and all others at last."""

    def entries(names: list[str], value: torch.Tensor) -> dict[str, Any]:
        values = [value, *(value.clone() if options.ties == "copy" else value for _ in names[1:])]
        return pinned_copy(dict(zip(names, values, strict=True)), pinned)

    attempt = gather.errors.attempt
    for names, value, cost in _tensors(gather, keys, options.dtype):
        kept = names[:1] if options.ties == "omit" else names
        size = cost * (len(kept) if options.ties == "copy" else 1)
        yield None if value is None else attempt(partial(entries, kept, value)), size
    if pinned is not None:
        attempt(partial(refuse_objects, keys.others))
    yield attempt(partial(pinned_copy, keys.others, pinned)) if gather.receives else None, 0


def _tensors(gather: Gather, keys: Keys, dtype: Precision) -> Iterator[tuple[list[str], torch.Tensor | None, int]]:
    """Yield the keys, the value, and the size in bytes of every parameter and buffer."""
    zero = gather.zero
    for parameter, value in parameter_values(gather, dtype):
        if names := keys.tensors.pop(parameter, None):
            yield names, value, whole_shape(parameter).numel() * dtype_of(zero, parameter, dtype).itemsize
    for buffer, names in keys.tensors.items():
        given = dtype_of(zero, buffer, dtype)
        value = gather.errors.attempt(partial(own_copy, buffer, given, gather.device)) if gather.receives else None
        yield names, value, buffer.numel() * given.itemsize


def _digest(model: Any, prefix: str) -> str:
    """Return a digest of the keys, to detect different modules on ranks, or the error of collecting them."""
    try:
        keys = keys_of(inspect_wrapper(model).module, prefix)
    except Exception as error:  # noqa: BLE001 - each rank sends it to the others, and raises it again itself
        return f"{type(error).__name__}: {error}"
    names = [*sum(keys.tensors.values(), []), *keys.others]
    return f"{len(names)} with SHA-256 {hashlib.sha256(chr(0).join(names).encode()).hexdigest()}"
