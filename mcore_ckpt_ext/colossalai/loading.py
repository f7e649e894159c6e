"""Loads an ordinary state dict strictly into a ZeRO wrapper: checks all of it, then writes it.

PyTorch itself checks the dict: the module loads it into stand-ins for its tensors (``stand_ins``). So PyTorch decides
about missing and unexpected keys, shapes, hooks and upgrades of older dicts, and the live module does not change before
all ranks have accepted the dict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from mcore_ckpt_ext.colossalai import tensor_parallel
from mcore_ckpt_ext.colossalai.loaded_masters import has_exact_masters
from mcore_ckpt_ext.colossalai.rank0_broadcast import same_content, value_of_first
from mcore_ckpt_ext.colossalai.ranks import GroupErrors
from mcore_ckpt_ext.colossalai.stand_ins import NoFreedStorage, StandIns, standing_in
from mcore_ckpt_ext.colossalai.wrapper import Place, Wrapped, inspect_wrapper, persistent_buffers
from mcore_ckpt_ext.errors import ModelMismatchError, ResumeRefusedError


class StateDictMismatchError(ModelMismatchError):
    """A state dict does not fit the module; a RuntimeError, as in PyTorch."""


@dataclass
class Accepted:
    """The values of an accepted state dict, and their destinations."""

    zero: Wrapped
    tensors: list[tuple[torch.Tensor, torch.Tensor]]
    extra_states: list[tuple[Callable[[Any], None], Any]]
    answer: Any


_UNTOUCHED = "the model is unchanged"


def zero_strict_load_state_dict(model: Any, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Load an ordinary state dict, such as PyTorch's or Hugging Face's; all ranks must call this.

    Tied parameters may have any of their names. Values are written into the fp32 masters unchanged, and from there,
    rounded once, into the working parameters.

    Args:
        model: a ZeroDDP or GeminiDDP.
        state_dict: the whole dict, the same on every rank except for buffers and extra state; it is not changed. Ranks
            may pass an empty dict, as `state_dict()` returns there, if rank 0 of their ZeRO group passes the whole one:
            they receive its values.
        strict: refuse missing and unexpected keys; otherwise they are reported.

    Returns:
        PyTorch's named tuple of missing and unexpected keys.

    Raises:
        StateDictMismatchError: on every rank: the dict does not fit (in PyTorch's words), or the ranks pass different
            dicts; nothing has been written on any rank.
        ResumeRefusedError: on every rank: a rank failed while it wrote, for example without memory; the model is
            partly written.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
    zero = inspect_wrapper(model)
    try:
        content = same_content(
            zero,
            "load_state_dict",
            {"strict": strict},
            state_dict,
            bool(state_dict),
            _UNTOUCHED,
            own=names_of_each_rank(zero, state_dict),
        )
        are_outlines = content.comes_from_first and not zero.is_first

        def accept_here() -> Accepted:
            with _hooks_of(model, zero.module):
                return accept(zero, content.outline, strict, are_outlines)

        accepted = zero.ranks.agree_here(accept_here, "calling load_state_dict", _UNTOUCHED)
    except ResumeRefusedError as error:
        raise StateDictMismatchError(str(error)) from error
    return write(accepted, content.comes_from_first, keeps_exact=has_exact_masters(model))


def write_master(
    zero: Wrapped,
    parameter: nn.Parameter,
    value: torch.Tensor,
    *,
    keeps_exact: bool = False,
    rows: torch.Tensor | None = None,
) -> None:
    """Write this rank's part of a whole value into the master, and rounded into the working parameter.

    Args:
        zero: the wrapper.
        parameter: a parameter in chunks.
        value: the whole value.
        keeps_exact: keep a master that rounds to the value.
        rows: the padding rows; None keeps the present ones, since a model's file has none.
    """
    local = tensor_parallel.slice_of(parameter, value.detach(), rows).reshape(-1)
    written = _not_padding(parameter) if rows is None else None
    master = zero.masters.get(parameter)
    if master is not None and not (keeps_exact and _rounds_to(master, local, written)):
        _write_place(master, local, torch.float32, written)
    _write_place(zero.working[parameter], local, torch.float32 if zero.masters else local.dtype, written)


def write_padding(zero: Wrapped, parameter: nn.Parameter, rows: torch.Tensor) -> None:
    """Write only this rank's padding rows of a parameter, into its master and weight."""
    local = tensor_parallel.slice_of(parameter, torch.zeros(tensor_parallel.whole_shape(parameter)), rows).reshape(-1)
    others = _not_padding(parameter)
    for place in (zero.masters.get(parameter), zero.working[parameter]):
        if place is not None and others is not None:
            _write_place(place, local, torch.float32, ~others)


def _not_padding(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return a mask of the non-padding elements of this rank's flat slice; None if it has no padding."""
    padding = tensor_parallel.is_padding(parameter)
    return None if padding is None else ~padding.reshape(-1)


def _rounds_to(master: Place, local: torch.Tensor, where: torch.Tensor | None) -> bool:
    held, first, last = master.local()
    rounded = held.to(local.dtype)
    given = local[first:last].to(held.device)
    if where is not None:
        kept = where[first:last].to(held.device)
        rounded = rounded[kept]
        given = given[kept]
    return torch.equal(rounded, given)


def _write_place(place: Place, local: torch.Tensor, through: torch.dtype, where: torch.Tensor | None) -> None:
    """Write this rank's part of a place; `where` selects elements of the slice, None all of them."""
    held, first, last = place.local()
    given = local[first:last].to(through)
    if where is None:
        held.copy_(given)
    else:
        held.copy_(torch.where(where[first:last].to(held.device), given.to(held), held))
    if getattr(place.chunk, "cuda_shard", None) is not None:
        # Otherwise an older pinned copy would be used as the current one (0.5.0, Chunk.shard_move).
        place.chunk.cpu_vis_flag = False


@torch.no_grad()
def write(accepted: Accepted, comes_from_first: bool = False, keeps_exact: bool = False) -> Any:
    """Write the values; a rank that fails reports it when the ranks next meet, at the end at the latest."""
    zero = accepted.zero
    errors = GroupErrors(zero.ranks, "writing the model", "it is partly written: do not train on, load again")

    def write_one(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if tensor in zero.working:
            write_master(zero, tensor, value, keeps_exact=keeps_exact)  # type: ignore[arg-type]  # a parameter
        else:
            _write_slice(tensor, value.detach())

    for tensor, given in accepted.tensors:
        value = value_of_first(zero, given, errors) if comes_from_first else given
        errors.attempt(partial(write_one, tensor, value))
    for set_extra_state, state in accepted.extra_states:
        errors.attempt(partial(set_extra_state, state))
    errors.raise_on_all()
    return accepted.answer


def _write_slice(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write this rank's slice of a whole value into a tensor; its padding rows stay."""
    local = tensor_parallel.slice_of(tensor, value)
    padding = tensor_parallel.is_padding(tensor)
    if padding is not None:
        local = torch.where(padding.to(tensor.device), tensor, local.to(tensor))
    tensor.copy_(local)


def accept(zero: Wrapped, state_dict: Mapping[str, Any], strict: bool, are_outlines: bool = False) -> Accepted:
    """Let PyTorch load the dict into stand-ins, and collect the values that they received."""
    if numbers := [key for key in state_dict if not isinstance(key, str)]:
        raise ModelMismatchError(
            "this is not the state dict of a model",
            found=f"the key {numbers[0]!r}",
            expected="names of parameters",
            hint="an optimizer's state dict has numbers: load it with the optimizer (booster.load_optimizer)",
        )
    offered = _with_all_names(zero, state_dict)
    stand_ins = StandIns(zero, offered.values(), are_outlines)
    extra_states: list[tuple[Callable[[Any], None], Any]] = []
    with standing_in(zero.module, stand_ins.replacements), _extra_states_noted(zero.module, extra_states):
        with NoFreedStorage(zero), stand_ins:
            answer = zero.module.load_state_dict(offered, strict=strict)
        loaded = {name: stand_ins.value_of(tensor) for name, tensor in _live_names(zero.module)}
    stand_ins.refuse_unloaded()
    for pair in stand_ins.copied_twice:
        _refuse_different(offered, *pair)
    taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, live in _live_names(zero.module):
        value = loaded.get(name)
        if value is not None:
            _refuse_different(offered, value, taken.setdefault(id(live), (live, value))[1])
            _refuse_shape(zero, name, live, value)
    return Accepted(zero, list(taken.values()), extra_states, answer)


@contextmanager
def _hooks_of(model: Any, module: nn.Module) -> Iterator[None]:
    """Call the load hooks of the wrapper around those of the module, as PyTorch and ColossalAI do."""
    module_hooks = {name: vars(module)[name] for name in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")}
    pre, post = module_hooks.values()
    after = [lambda _, keys, hook=hook: hook(model, keys) for hook in model._load_state_dict_post_hooks.values()]
    vars(module).update(
        _load_state_dict_pre_hooks=OrderedDict(enumerate([*model._load_state_dict_pre_hooks.values(), *pre.values()])),
        _load_state_dict_post_hooks=OrderedDict(enumerate([*post.values(), *after])),
    )
    try:
        yield
    finally:
        vars(module).update(module_hooks)


def _with_all_names(zero: Wrapped, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a state dict with plain tensors, and store a tied parameter under each of its names."""
    offered = OrderedDict(state_dict)
    for key, value in state_dict.items():
        if isinstance(value, nn.Parameter):
            # PyTorch would change requires_grad of the caller's own parameter.
            offered[key] = value.detach()
    if hasattr(state_dict, "_metadata"):
        vars(offered)["_metadata"] = state_dict._metadata
    for names in [*zero.names.values(), *_names_of_buffers(zero.module).values()]:
        given = [name for name in names if name in state_dict]
        offered.update((name, offered[given[0]]) for name in names if given and name not in offered)
    return offered


def names_of_each_rank(zero: Wrapped, state_dict: Mapping[str, Any]) -> set[str]:
    """Return the entries that may differ between ranks: ZeRO shards and averages only parameters."""
    buffers = {name for names in _names_of_buffers(zero.module).values() for name in names}
    return buffers | {name for name in state_dict if str(name).endswith("_extra_state")}


def _names_of_buffers(module: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return every name of each buffer that a state dict holds."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, buffer in persistent_buffers(module, remove_duplicate=False):
        names.setdefault(buffer, []).append(name)
    return names


def _live_names(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _refuse_different(offered: Mapping[str, Any], value: torch.Tensor, other: torch.Tensor) -> None:
    """Check that all names of a tensor have the same value; PyTorch would silently keep the last one."""
    if value is other or value.data_ptr() == other.data_ptr():
        return
    if not torch.allclose(value, other.to(value), rtol=0, atol=0, equal_nan=True):
        pointers = {value.data_ptr(), other.data_ptr()}
        names = [
            name
            for name, tensor in offered.items()
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in pointers
        ]
        raise RuntimeError(f"names of the same tensor have different values: {', '.join(names)}")


def _refuse_shape(zero: Wrapped, name: str, live: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse a value in a shape of a module's own making, which cannot be written into the live tensor."""
    shape = tensor_parallel.whole_shape(live) if isinstance(live, nn.Parameter) else live.shape
    if value.shape != shape:
        raise RuntimeError(
            f"size mismatch for {name}: the module has replaced it by a tensor of shape {tuple(value.shape)} while it "
            f"was loaded, the shape in current model is {tuple(shape)}."
        )


@contextmanager
def _extra_states_noted(module: nn.Module, noted: list[tuple[Callable[[Any], None], Any]]) -> Iterator[None]:
    """Record the extra states that PyTorch would set, instead of setting them."""

    def note(set_extra_state: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda state: noted.append((set_extra_state, state))

    owners = [m for m in module.modules() if type(m).set_extra_state is not nn.Module.set_extra_state]
    for owner in owners:
        owner.__dict__["set_extra_state"] = note(owner.set_extra_state)
    try:
        yield
    finally:
        for owner in owners:
            owner.__dict__.pop("set_extra_state", None)
