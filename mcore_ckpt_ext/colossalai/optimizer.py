"""The state of GeminiOptimizer: gathered like parameters, in model space, loaded under any layout.

The dict is ColossalAI's own (0.5.0, zero/gemini/gemini_optimizer.py: ``state_dict``): ``param_groups`` and ``state``,
ids in the order of the groups, whole tensors in fp32. The first group also contains what ColossalAI does not save: the
loss scale and the parameters' names. If the model is not saved in master precision, the state has the masters, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from mcore_ckpt_ext.collectives import OPTIMIZER_UNCHANGED
from mcore_ckpt_ext.colossalai import padding, tensor_parallel
from mcore_ckpt_ext.colossalai.gathering import Gather
from mcore_ckpt_ext.colossalai.loaded_masters import note_exact_masters
from mcore_ckpt_ext.colossalai.loading import write_master, write_padding
from mcore_ckpt_ext.colossalai.loss_scale import loss_scale, set_loss_scale
from mcore_ckpt_ext.colossalai.lost_states import (
    MASTER,
    OURS,
    drop_outdated,
    names_without_state,
    newest_step,
    stateless_note,
    warn_of_missing_states,
)
from mcore_ckpt_ext.colossalai.nan_check import refuse_nan
from mcore_ckpt_ext.colossalai.rank0_broadcast import same_content, value_of_first
from mcore_ckpt_ext.colossalai.ranks import GroupErrors
from mcore_ckpt_ext.colossalai.wrapper import Place, Wrapped, inspect_wrapper
from mcore_ckpt_ext.errors import ModelMismatchError, quantity

_PADDING = "padding"

State = dict[str, Any]
Padding = dict[int, dict[str, torch.Tensor]]
"""Padding rows, by the parameter's number and the kind of state."""


class GatheredState:
    """The whole state of a GeminiOptimizer, in the order of the chunks; all ranks must iterate over it.

    It yields the id and the state of every parameter that has some: tensors in fp32 on the CPU, `step` as PyTorch keeps
    it; None on ranks that do not receive it.

    Args:
        optimizer: a GeminiOptimizer; if the model's file is rounded, the state has the masters, as `fp32_param`.
        only_rank_0: rank 0 of each ZeRO group receives everything, the others None; else all receive it.

    Attributes:
        errors: stops all ranks if one fails.
    """

    def __init__(self, optimizer: Any, only_rank_0: bool = True) -> None:
        self._optimizer = optimizer
        self._zero = zero = inspect_wrapper(optimizer.module)
        self.errors = GroupErrors(zero.ranks, "calling optimizer.state_dict", "no rank has the whole state")
        self._gather = Gather(zero, self.errors, everywhere=not only_rank_0)
        self._with_masters = optimizer._saves_masters()
        self._padding: Padding = {}

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the param groups, once the state has been received.

        The first has the padding rows of every kind, masters included; in `state` ColossalAI would misread them.
        """
        groups: list[dict[str, Any]] = self._optimizer.get_param_groups_for_saving()
        if groups and self._padding:
            groups[0] = {**groups[0], OURS: {**groups[0][OURS], _PADDING: self._padding}}
        return groups

    def __iter__(self) -> Iterator[tuple[int, State | None]]:
        """Gather the state.

        Raises:
            ResumeRefusedError: on all ranks.
        """
        masters = self._zero.masters
        described = self._describe_by_all()
        names = (name for state in described.values() for name, value in state.items() if value is None)
        kinds = list(dict.fromkeys(names)) + ([MASTER] if self._with_masters and masters else [])
        ids = {self._optimizer.id_to_real_params[key]: key for key in described}
        places = {p: place for p, place in (masters or self._zero.working).items() if p in ids}
        rows: dict[str, dict[nn.Parameter, torch.Tensor]] = {kind: {} for kind in kinds}
        streams = [
            self._gather.whole_values(places, partial(self._laid_out, places, kind), torch.float32, rows[kind])
            for kind in kinds
        ]
        for values in zip(*streams, strict=True):
            parameter, first_value = values[0]
            key = ids[parameter]
            if of_kinds := {kind: held[parameter] for kind, held in rows.items() if parameter in held}:
                self._padding[key] = of_kinds
            if first_value is None:
                yield key, None
            else:
                state = {name: value for name, value in described[key].items() if value is not None}
                per_element = zip(kinds, (value for _, value in values), strict=True)
                yield key, state | {k: v for k, v in per_element if k in described[key] or k == MASTER}
        if MASTER not in kinds:
            self._gather_padded_masters()

    def _describe_by_all(self) -> dict[int, State]:
        """Return for every parameter with state: scalar states, and None for states per element."""

        def inspect_here() -> dict[int, State]:
            refuse_nan(self._zero, self._zero.masters)
            return _describe(self._optimizer)

        call = {"only_rank_0": not self._gather.everywhere, "with_masters": self._with_masters}
        # A rank only has the states of parameters of which it holds a part; all ranks together have all.
        described: dict[int, State] = {}
        for rank_states in self._zero.ranks.same_call("optimizer.state_dict", call, inspect_here).values():
            described.update(rank_states)
        if self._with_masters:
            for key, parameter in self._optimizer.id_to_real_params.items():
                if parameter in self._zero.masters:
                    described.setdefault(key, {})
        return described

    def _laid_out(self, places: Mapping[nn.Parameter, Place], kind: str, chunk: Any) -> torch.Tensor:
        """Return one kind of state in the chunk's layout."""
        optimizer = self._optimizer
        if kind == MASTER:
            return chunk.payload  # type: ignore[no-any-return]
        flat = torch.zeros(len(chunk.payload), dtype=torch.float32, device=chunk.payload.device)
        for key, fake in optimizer.id_to_fake_params.items():
            place = places.get(optimizer.id_to_real_params[key])
            state = optimizer.optim.state.get(fake, {})
            if place is not None and place.chunk is chunk and kind in state:
                begin, end = optimizer.param_to_range[fake]
                flat[begin:end].copy_(state[kind].reshape(-1))
        return flat

    def _gather_padded_masters(self) -> None:
        """Gather the masters' padding rows, since the masters themselves were not gathered."""
        ids = {parameter: key for key, parameter in self._optimizer.id_to_real_params.items()}
        places = self._zero.masters or self._zero.working
        padded = {p: place for p, place in places.items() if p in ids and tensor_parallel.padding_shape(p) is not None}
        rows: dict[nn.Parameter, torch.Tensor] = {}
        for _ in self._gather.whole_values(padded, lambda chunk: chunk.payload, torch.float32, rows):
            pass
        for parameter, values in rows.items():
            self._padding.setdefault(ids[parameter], {})[MASTER] = values.float()


def param_groups(optimizer: Any, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add loss scale, names, and which parameters have no state, to the first param group.

    Gemini steps all parameters in chunks at once (0.5.0, ``_set_grad_ptr``), and rank 0 has a part of every chunk, so
    this needs no other rank. If only some have a state, because a file had no others, it is not said which.
    """
    wrapper = inspect_wrapper(optimizer.module)
    names = wrapper.names
    real = optimizer.id_to_real_params
    note: dict[str, Any] = {}
    states = [optimizer.optim.state.get(fake) or {} for fake in optimizer.id_to_fake_params.values()]
    if all(states) or not any(states):
        has_states = any(states) or optimizer._saves_masters()
        chunked = (key for key, parameter in real.items() if has_states and parameter in wrapper.working)
        note |= stateless_note(real, chunked, newest_step(states))
    if all(parameter in names for parameter in real.values()):
        note["names"] = [names[real[key]][0] for key in sorted(real)]
    scale = loss_scale(optimizer)
    if scale is not None:
        note["loss_scale"] = scale
    # torch's safe unpickler does not know numpy's scalars, which schedulers store.
    groups = [{n: v.item() if isinstance(v, np.generic) else v for n, v in group.items()} for group in groups]
    return [{**group, OURS: note} if place == 0 else group for place, group in enumerate(groups)]


def load_groups(optimizer: Any, groups: list[dict[str, Any]], load_param_groups: Any) -> None:
    """Load param groups by ColossalAI's own method, and the loss scale that `param_groups` added."""
    note = groups[0].get(OURS, {}) if groups else {}
    load_param_groups([{key: value for key, value in group.items() if key != OURS} for group in groups])
    if "loss_scale" in note:
        set_loss_scale(optimizer, note["loss_scale"])


def load(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Load an optimizer's whole state dict, saved under any layout, after all ranks have accepted it.

    Args:
        optimizer: a GeminiOptimizer.
        state_dict: the whole `param_groups` and `state`; a rank whose `state` is empty, as `state_dict()` returns it on
            all ranks but rank 0 of the ZeRO group, receives that of rank 0.

    Raises:
        ResumeRefusedError: on all ranks; nothing has been written, unless the message says that the state is partly
            written, for example because a rank ran out of memory.
    """
    zero = inspect_wrapper(optimizer.module)
    state_dict = drop_outdated(state_dict)
    is_full = any(state_dict.get("state", {}).values())
    content = same_content(zero, "optimizer.load_state_dict", {}, state_dict, is_full, OPTIMIZER_UNCHANGED)
    groups, states, rows, without = zero.ranks.agree_here(
        lambda: _match(optimizer, zero, content.outline), "calling optimizer.load_state_dict", OPTIMIZER_UNCHANGED
    )
    warn_of_missing_states(zero.ranks, without)
    errors = GroupErrors(zero.ranks, "writing the optimizer", "it is partly written: do not train on, load again")
    errors.attempt(partial(optimizer.load_param_groups, groups))
    for fake in optimizer.id_to_fake_params.values():
        optimizer.optim.state.pop(fake, None)
    for key in sorted(states):
        state = _receive(zero, states[key], errors) if content.comes_from_first else states[key]
        errors.attempt(partial(_write, optimizer, zero, key, state, rows.get(key, {})))
    for key, parameter in optimizer.id_to_real_params.items():
        if MASTER not in states.get(key, {}) and parameter in zero.working:
            errors.attempt(partial(_write_padding, zero, parameter, rows.get(key, {})))
    errors.raise_on_all()
    if any(MASTER in state for state in states.values()):
        note_exact_masters(optimizer.module, optimizer)


def _receive(zero: Wrapped, state: State, errors: GroupErrors) -> State:
    return {n: value_of_first(zero, v, errors) if isinstance(v, torch.Tensor) else v for n, v in state.items()}


def _write(optimizer: Any, zero: Wrapped, key: int, state: State, rows: Mapping[str, torch.Tensor]) -> None:
    """Write this rank's part of one parameter's state, and of its master if the state has it."""
    parameter = optimizer.id_to_real_params[key]
    named = zero.names[parameter][0]
    fitting = {name: padding.fit_padding(parameter, f"{name} of {named}", rows.get(name)) for name in state}
    if key in optimizer.id_to_fake_params:
        local = _local_state(optimizer, zero, key, state, fitting)
        optimizer.optim.state[optimizer.id_to_fake_params[key]].update(local)
    if MASTER in state:
        write_master(zero, parameter, state[MASTER], rows=fitting[MASTER])


def _write_padding(zero: Wrapped, parameter: nn.Parameter, rows: Mapping[str, torch.Tensor]) -> None:
    fitting = padding.fit_padding(parameter, f"{MASTER} of {zero.names[parameter][0]}", rows.get(MASTER))
    if fitting is not None:
        write_padding(zero, parameter, fitting)


def _describe(optimizer: Any) -> dict[int, State]:
    """Return for parameters with a part on this rank: scalar states, and None for states per element."""
    described: dict[int, State] = {}
    for key, fake in optimizer.id_to_fake_params.items():
        begin, end = optimizer.param_to_range[fake]
        state = optimizer.optim.state.get(fake, {})
        if state:
            described[key] = {name: _scalar(name, value, end - begin) for name, value in state.items()}
    return described


def _scalar(name: str, value: Any, elements: int) -> Any:
    if name == "step":
        return torch.tensor(float(value), dtype=torch.float32)
    return None if isinstance(value, torch.Tensor) and value.numel() == elements else value


def _match(
    optimizer: Any, zero: Wrapped, state_dict: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[int, State], Padding, list[str]]:
    """Return the groups, states and padding rows under this optimizer's ids, if the parameters match.

    The last item names parameters that have no state, if nothing says why.

    Raises:
        ModelMismatchError: other parameters, or a state of another shape.
    """
    groups = state_dict["param_groups"]
    states = state_dict["state"]
    saved = [key for group in groups for key in group["params"]]
    real = optimizer.id_to_real_params
    if sorted(saved) != sorted(real):
        raise ModelMismatchError(
            "the optimizer state belongs to other parameters",
            found=quantity(len(saved), "parameter"),
            expected=str(len(real)),
        )
    note = groups[0].get(OURS, {}) if groups else {}
    ours = _same_named(zero, real, note.get("names"))
    stepped = {key: zero.names[real[ours[key]]][0] for key in saved if real[ours[key]] in zero.working}
    without = names_without_state(groups, states, stepped)
    rows = {ours[key]: of_key for key, of_key in note.get(_PADDING, {}).items()}
    groups = [{**group, "params": [ours[key] for key in group["params"]]} for group in groups]
    states = {ours[key]: dict(state) for key, state in states.items() if state}
    for key, state in states.items():
        shape = tensor_parallel.whole_shape(real[key])
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != shape:
                raise ModelMismatchError(
                    "an optimizer state has another shape than its parameter",
                    found=tuple(value.shape),
                    expected=tuple(shape),
                    where=f"{name} of {zero.names[real[key]][0]}",
                )
    return groups, states, rows, without


def _same_named(zero: Wrapped, real: Mapping[int, nn.Parameter], saved: Sequence[str] | None) -> dict[int, int]:
    """Map the dict's ids to this optimizer's: by the parameters' names, in the ids' order, if saved."""
    if saved is None:
        return {key: key for key in real}
    by_name = {name: key for key, parameter in real.items() for name in zero.names.get(parameter, ())}
    lost = [name for name in saved if name not in by_name]
    if lost:
        raise ModelMismatchError(
            "the optimizer state belongs to other parameters",
            found=", ".join(lost[:4]),
            expected=", ".join(list(by_name)[:4]),
        )
    return {key: by_name[name] for key, name in zip(sorted(real), saved, strict=True)}


def _local_state(
    optimizer: Any, zero: Wrapped, key: int, state: Mapping[str, Any], rows: Mapping[str, torch.Tensor | None]
) -> State:
    """Return this rank's part of one parameter's state."""
    parameter = optimizer.id_to_real_params[key]
    fake = optimizer.id_to_fake_params[key]
    place: Place = (zero.masters or zero.working)[parameter]
    _, first, last = place.local()
    local: State = {}
    for name, value in state.items():
        if name == "step":
            local[name] = int(value)
        elif isinstance(value, torch.Tensor) and value.shape == tensor_parallel.whole_shape(parameter):
            flat = tensor_parallel.slice_of(parameter, value, rows[name]).reshape(-1)[first:last]
            # Adam keeps its moments in the dtype of the stepped tensor (0.5.0, nn/optimizer/hybrid_adam.py:
            # zeros_like).
            local[name] = torch.empty(last - first, dtype=place.chunk.dtype, device=fake.device).copy_(flat)
        else:
            local[name] = value
    local.pop(MASTER, None)
    return local
