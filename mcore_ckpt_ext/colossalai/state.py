"""The state dict that the unwrapped module would return, and the module itself.

The values are gathered first. Then the module's own ``state_dict`` runs with them in place of its freed parameters. So
PyTorch itself determines keys, their order, ``_metadata``, ``_extra_state``, modules under two names and state_dict
hooks.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn

from mcore_ckpt_ext.colossalai import tensor_parallel
from mcore_ckpt_ext.colossalai.deepcopy_memo import memo_of_uncopied
from mcore_ckpt_ext.colossalai.gathering import Gather, own_copy
from mcore_ckpt_ext.colossalai.nan_check import refuse_nan
from mcore_ckpt_ext.colossalai.ranks import GroupErrors
from mcore_ckpt_ext.colossalai.replaced import keeps_signature
from mcore_ckpt_ext.colossalai.stand_ins import NoFreedStorage, standing_in
from mcore_ckpt_ext.colossalai.wrapper import Place, Wrapped, inspect_wrapper
from mcore_ckpt_ext.errors import CheckpointError, ModelMismatchError, quantity

Precision = Literal["master", "compute"] | torch.dtype
Ties = Literal["share", "copy", "omit"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class StateDictOptions:
    """Options of a call that returns the state of a wrapper, the same on all ranks.

    Args:
        dtype: see `zero_strict_state_dict`; never None (`precision_of`).
        only_rank_0: see `zero_strict_state_dict`, like all others.
        device: each rank may name its own GPU, so only its type has to be equal.
    """

    dtype: Precision
    only_rank_0: bool = True
    device: torch.device | str = "cpu"
    prefix: str = ""
    keep_vars: bool = False
    ties: Ties = "share"


@keeps_signature
def zero_strict_state_dict(
    model: Any, *, destination: Any = None, prefix: str = "", keep_vars: bool = False, dtype: Precision | None = None,
    only_rank_0: bool = True, device: torch.device | str = "cpu", ties: Ties = "share",
) -> Any:  # fmt: skip
    """Return the state dict of the unwrapped module, as PyTorch would return it.

    All ranks must call this.

    Args:
        model: a ZeroDDP or GeminiDDP.
        destination: a dict to fill, as in PyTorch.
        prefix: precedes every key.
        keep_vars: return parameters instead of detached tensors; they are copies in any case.
        dtype: "master" for the exact fp32 masters, "compute" for the dtype of the forward pass, or any dtype; None for
            "master", or "compute" if the wrapper keeps no masters (`master_weights=False`). ColossalAI rounds tensors
            outside of chunks (buffers, frozen and ignored parameters) to the compute dtype when it wraps the module;
            "master" returns them in fp32, so that the dict has one dtype.
        only_rank_0: rank 0 of each ZeRO group receives everything, the others an empty dict; else all receive it.
        device: the device of the values.
        ties: names of one tensor: "share" one storage as in PyTorch, "copy" for a storage each, or "omit" all but the
            first.

    Raises:
        CheckpointError: on every rank, before or after gathering; never on some ranks only.
    """
    callers = dict(destination or {})

    def state_dict_of(zero: Wrapped, values: _Values) -> Any:
        with standing_in(zero.module, values), NoFreedStorage(zero):
            for hook in getattr(model, "_state_dict_pre_hooks", {}).values():
                hook(model, prefix, keep_vars)
            result = zero.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
            result = _with_hooks_of(model, result, prefix)
        if ties != "share":
            untie(result, callers, omit=ties == "omit")
        return result

    options = StateDictOptions(precision_of(model, dtype), only_rank_0, device, prefix, keep_vars, ties)
    result = _make_from_values(model, "state_dict", options, state_dict_of)
    if result is None:
        return OrderedDict() if destination is None else destination
    return result


def get_static_torch_model(
    zero_ddp_model: Any, device: torch.device | str = "cpu", dtype: Precision | None = None, only_rank_0: bool = True
) -> nn.Module | None:
    """Return an ordinary module with the values of the wrapped one; all ranks must call this.

    Tied parameters are tied, shared modules shared, and only process groups are shared with the live module. Its
    `state_dict()` is the strict state dict.

    Args:
        zero_ddp_model: a ZeroDDP or GeminiDDP; ColossalAI's own function has this parameter name.
        device: the device of parameters and buffers.
        dtype: see `zero_strict_state_dict`.
        only_rank_0: rank 0 of each ZeRO group receives the module, the others None; else all receive it.

    Raises:
        CheckpointError: on every rank; also if the module's layers are tensor-parallel, and so cannot compute alone.
    """

    def copy_of(zero: Wrapped, values: _Values) -> nn.Module:
        _refuse_tensor_parallel(zero)
        with NoFreedStorage(zero):
            return copy.deepcopy(zero.module, memo_of_uncopied(zero.module) | values)

    options = StateDictOptions(precision_of(zero_ddp_model, dtype), only_rank_0, device)
    return _make_from_values(zero_ddp_model, "get_static_torch_model", options, copy_of)


_Values = dict[int, torch.Tensor]
"""Replacements for live parameters and buffers, by id."""


def _make_from_values(
    model: Any, call: str, options: StateDictOptions, make: Callable[[Wrapped, _Values], Result]
) -> Result | None:
    """Gather all values, and return what `make` makes of them; None on ranks that do not receive them.

    Its errors reach all ranks.
    """
    gather = begin(model, call, options, "no rank has a result")
    zero = gather.zero
    values: _Values = {}
    for parameter, value in parameter_values(gather, options.dtype):
        if value is not None:
            values[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)

    def finish() -> Result:
        for buffer in zero.module.buffers():
            values[id(buffer)] = own_copy(buffer, dtype_of(zero, buffer, options.dtype), gather.device)
        return make(zero, values)

    result = gather.errors.attempt(finish) if gather.receives else None
    gather.errors.raise_on_all()
    return result


def precision_of(model: Any, dtype: Precision | None) -> Precision:
    """Return the requested precision, or by default the one that holds the values exactly.

    `GeminiDDP(master_weights=False)`, since ColossalAI 0.3.2, trains the compute values themselves
    (zero/gemini/gemini_ddp.py); other wrappers keep masters.
    """
    if dtype is not None:
        return dtype
    return "master" if getattr(model, "master_weights", True) else "compute"


def begin(
    model: Any, call: str, options: StateDictOptions, consequence: str, compared: Mapping[str, object] | None = None
) -> Gather:
    """Inspect the wrapper, and check the call on all ranks.

    Args:
        model: the wrapper.
        call: the call on this rank.
        options: what it returns.
        consequence: the state in which a later failure leaves the job.
        compared: further arguments that must be equal on all ranks.

    Raises:
        CheckpointError: the model is no ZeRO wrapper.
        ResumeRefusedError: on all ranks: there are no masters, or NaN, or the arguments differ between ranks.
    """
    zero = inspect_wrapper(model)

    def inspect_here() -> None:
        _refuse_unknown_ties(options.ties)
        refuse_nan(zero, source_of(zero, options.dtype))

    device = torch.device(options.device)
    zero.ranks.same_call(call, {**vars(options), "device": device.type, **(compared or {})}, inspect_here)
    return Gather(zero, GroupErrors(zero.ranks, f"calling {call}", consequence), not options.only_rank_0, device)


def _refuse_unknown_ties(ties: object) -> None:
    if ties not in get_args(Ties):
        raise CheckpointError(
            "invalid treatment of tied parameters",
            found=repr(ties),
            expected='"share", "copy" (a storage each) or "omit"',
        )


def source_of(zero: Wrapped, dtype: Precision) -> Mapping[nn.Parameter, Place]:
    """Return the places of the current values: the masters or, without masters, the working parameters.

    The working chunks hold gradients between backward and step (``reuse_fp16_chunk``).

    Raises:
        CheckpointError: masters are requested, but there are none.
    """
    if dtype == "master" and zero.working and not zero.masters:
        raise CheckpointError(
            "there are no fp32 masters to save",
            found="a wrapper made with master_weights=False",
            expected='dtype="compute" or a torch.dtype',
            hint="leave the dtype out, or wrap with master_weights=True",
        )
    refuse_no_precision(dtype)
    return zero.masters or zero.working


def refuse_no_precision(dtype: object) -> None:
    """Refuse a dtype in which values cannot be returned.

    Raises:
        CheckpointError: it is not a precision, or no parameter can have it.
    """
    if dtype in ("master", "compute") or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return
    mistaken = isinstance(dtype, bool)
    raise CheckpointError(
        "invalid dtype for parameters",
        found=repr(dtype),
        expected='"master", "compute" or a torch.dtype of floating point',
        hint="strict is a keyword: state_dict(strict=...)" if mistaken else None,
    )


def dtype_of(zero: Wrapped, tensor: torch.Tensor, dtype: Precision) -> torch.dtype:
    """Return the dtype in which a parameter or buffer is returned."""
    if not tensor.is_floating_point():
        return tensor.dtype
    if isinstance(dtype, torch.dtype):
        return dtype
    if tensor.dtype == zero.compute_dtype and dtype == "master":
        return torch.float32
    return tensor.dtype


def parameter_values(gather: Gather, dtype: Precision) -> Iterator[tuple[nn.Parameter, torch.Tensor | None]]:
    """Yield every parameter with its whole value, or None on ranks that do not receive it.

    All ranks iterate.
    """
    zero = gather.zero
    errors = gather.errors
    given = dtype if isinstance(dtype, torch.dtype) else {"master": torch.float32, "compute": zero.compute_dtype}[dtype]
    yield from gather.whole_values(source_of(zero, dtype), lambda chunk: chunk.payload, given)
    for parameter in zero.outside:
        room = None
        local = parameter.detach()
        if tensor_parallel.is_sharded(parameter):
            room = errors.attempt(partial(tensor_parallel.room_for, parameter, parameter.dtype, parameter.device))
            local = errors.attempt(local.contiguous)  # type: ignore[assignment]  # no rank has failed
            errors.raise_on_all()
        if not gather.receives:
            yield parameter, None
            continue
        # Tensor-parallel ranks of one kind all receive, so they gather among themselves.
        whole = tensor_parallel.whole(parameter, local, room)
        yield parameter, errors.attempt(partial(own_copy, whole, dtype_of(zero, parameter, dtype), gather.device))


def _with_hooks_of(model: Any, result: Any, prefix: str) -> Any:
    """Call the hooks that were registered on the wrapper itself, as both ColossalAI and PyTorch do."""
    metadata = getattr(result, "_metadata", {}).get(prefix[:-1], {})
    for hook in getattr(model, "_state_dict_hooks", {}).values():
        replaced = hook(model, result, prefix, metadata)
        result = result if replaced is None else replaced
    return result


def untie(result: Any, callers: Mapping[str, Any], omit: bool) -> None:
    """Copy the storage for every later name, or leave the name out; entries of the caller are left alone."""
    seen: set[int] = set()
    for key, value in list(result.items()):
        if not isinstance(value, torch.Tensor) or value is callers.get(key):
            continue
        pointer = value.untyped_storage().data_ptr()
        if pointer in seen and value.numel():
            if omit:
                del result[key]
            else:
                result[key] = value.clone()
        seen.add(pointer)


def _refuse_tensor_parallel(zero: Wrapped) -> None:
    sharded = [name for name, parameter in zero.module.named_parameters() if tensor_parallel.is_sharded(parameter)]
    if sharded:
        raise ModelMismatchError(
            "a tensor-parallel module cannot run on its own",
            found=quantity(len(sharded), "sharded parameter"),
            where=sharded[0],
            hint="build the module again without Shardformer, and load model.state_dict() into it",
        )
