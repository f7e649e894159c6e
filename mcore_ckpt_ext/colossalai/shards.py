"""Yields the strict state dict in shards of bounded size: at most a chunk and a shard are in memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from mcore_ckpt_ext.colossalai.gathering import own_copy, pinned_copy
from mcore_ckpt_ext.colossalai.ranks import GroupErrors
from mcore_ckpt_ext.colossalai.state import (
    Precision,
    Ties,
    begun,
    dtype_of,
    parameter_values,
    precision_of,
    standing_in,
)
from mcore_ckpt_ext.colossalai.wrapper import Wrapped, wrapped
from mcore_ckpt_ext.errors import UnsupportedCheckpointError

Shard = tuple["OrderedDict[str, Any]", int]


class Keys(NamedTuple):
    """The keys of the strict state dict, in order: of parameters, of buffers, others with their values."""

    parameters: dict[nn.Parameter, list[str]]
    buffers: dict[torch.Tensor, list[str]]
    others: dict[str, Any]


def keys_of(zero: Wrapped, prefix: str = "") -> Keys:
    """Collect the keys of the module's state dict, with tensors that only have shapes.

    Raises:
        UnsupportedCheckpointError: a hook makes tensors that are neither parameters nor buffers.
    """
    stand_ins = shapes_of(zero)
    with standing_in(zero.module, {key: stand_in for key, (_, stand_in) in stand_ins.items()}):
        state = zero.module.state_dict(prefix=prefix, keep_vars=True)
    live = {id(stand_in): tensor for tensor, stand_in in stand_ins.values()}
    keys = Keys({}, {}, {})
    for key, value in state.items():
        tensor = live.get(id(value))
        if isinstance(tensor, nn.Parameter):
            keys.parameters.setdefault(tensor, []).append(key)
        elif tensor is not None:
            keys.buffers.setdefault(tensor, []).append(key)
        elif isinstance(value, torch.Tensor) and value.is_meta:
            raise UnsupportedCheckpointError(
                "a state_dict hook, or a module's _save_to_state_dict, computes new values from the whole state dict",
                where=key,
                hint="save unsharded (shard=False), or remove the hook",
            )
        else:
            keys.others[key] = value
    return keys


def shapes_of(zero: Wrapped) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return for every parameter and buffer, by id: itself, and a tensor of its whole shape without data."""
    stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for parameter in zero.module.parameters():
        empty = torch.empty(zero.shape_of(parameter), dtype=parameter.dtype, device="meta")
        stand_ins[id(parameter)] = parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in zero.module.buffers():
        stand_ins[id(buffer)] = buffer, torch.empty_like(buffer, device="meta")
    return stand_ins


def iter_zero_strict_state_dict(
    model: Any,
    max_shard_bytes: int,
    *,
    prefix: str = "",
    dtype: Precision | None = None,
    only_rank_0: bool = True,
    device: torch.device | str = "cpu",
    ties: Ties = "share",
    pinned: dict[str, Any] | None = None,
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
        pinned: pinned memory by key, which receives the values; missing entries are allocated.

    Yields:
        A shard and its size in bytes.

    Raises:
        CheckpointError: on every rank; except for out of memory, before the first shard.
    """
    device = torch.device(device)
    dtype = precision_of(model, dtype)
    arguments = {"prefix": prefix, "max_shard_bytes": max_shard_bytes, "device": device.type, "ties": ties}
    # Enumerated twice, because the ranks must also agree that it is possible.
    zero = begun(model, "state_dict_shard", dtype, only_rank_0, **arguments, keys=_digest(model, prefix))
    keys = keys_of(zero, prefix)
    everywhere = not only_rank_0
    fate = GroupErrors(zero.ranks, "calling state_dict_shard", "no rank has all shards")
    shard: OrderedDict[str, Any] = OrderedDict()
    size = 0
    for names, value, cost in _items(zero, keys, dtype, device, everywhere, fate):
        names = names[:1] if ties == "omit" else names
        cost *= len(names) if ties == "copy" else 1
        if size and size + cost > max_shard_bytes:
            yield from handed_over(fate.attempt(partial(pinned_copy, shard, pinned)), size, fate)
            shard = OrderedDict()
            size = 0
        size += cost
        if value is not None:
            shard[names[0]] = value
            for name in names[1:]:
                shard[name] = fate.attempt(value.clone) if ties == "copy" else value
    if everywhere or zero.is_first:
        shard.update(keys.others)
    yield from handed_over(fate.attempt(partial(pinned_copy, shard, pinned)), size, fate)
    fate.meet()


def handed_over(shard: Any, size: int, fate: GroupErrors) -> Iterator[tuple[Any, int]]:
    """Yield a shard, unless this rank has failed; an error thrown into the generator makes it fail."""
    if fate.failure is None:
        try:
            yield shard, size
        except Exception as error:  # noqa: BLE001 - any error of the consumer has to be reported to the other ranks
            fate.failure = error


@contextmanager
def consumer_errors_reported(owner: Any, method: str) -> Iterator[None]:
    """Report an error of ColossalAI's asynchronous writer to the ranks that wait for the next shard.

    ColossalAI's function receives the shards in a loop (0.5.0, checkpoint_io/utils.py:
    ``async_save_state_dict_shards``), so that its error does not reach the generator by itself.

    Args:
        owner: the model or optimizer that yields the shards.
        method: name of the method that returns their generator.
    """
    begun_here: list[Generator[Any]] = []
    original = getattr(owner, method)

    def recorded(*arguments: Any, **keywords: Any) -> Generator[Any]:
        begun_here.append(original(*arguments, **keywords))
        return begun_here[-1]

    setattr(owner, method, recorded)
    try:
        yield
    except Exception as error:
        for shards in begun_here:
            with suppress(Exception):  # the same error in the words that all ranks get
                shards.throw(error)
        raise
    finally:
        delattr(owner, method)


def _items(
    zero: Wrapped, keys: Keys, dtype: Precision, device: torch.device, everywhere: bool, fate: GroupErrors
) -> Iterator[tuple[list[str], torch.Tensor | None, int]]:
    for parameter, value in parameter_values(zero, dtype, device=device, everywhere=everywhere, fate=fate):
        if names := keys.parameters.get(parameter):
            yield names, value, zero.shape_of(parameter).numel() * dtype_of(zero, parameter, dtype).itemsize
    for buffer, names in keys.buffers.items():
        given = dtype_of(zero, buffer, dtype)
        receives = everywhere or zero.is_first
        value = fate.attempt(partial(own_copy, buffer, given, device)) if receives else None
        yield names, value, buffer.numel() * given.itemsize


def _digest(model: Any, prefix: str) -> str:
    """Return a digest of the keys, to detect different modules on ranks, or the error of collecting them."""
    try:
        keys = keys_of(wrapped(model), prefix)
    except Exception as error:  # noqa: BLE001 - each rank sends it to the others, and raises it again itself
        return f"{type(error).__name__}: {error}"
    names = [*sum(keys.parameters.values(), []), *sum(keys.buffers.values(), []), *keys.others]
    return f"{len(names)} with SHA-256 {hashlib.sha256(chr(0).join(names).encode()).hexdigest()}"
