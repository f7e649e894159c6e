"""Saves masters and loss scale with an optimizer's moments, through ColossalAI's own code.

During a save or load they are part of the optimizer's state, so that ColossalAI's code gathers, shards and writes them
like moments. ColossalAI without this package ignores them on loading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from mcore_ckpt_ext.colossalai.files import NOT_WHOLE
from mcore_ckpt_ext.colossalai.hybrid_cuts import is_per_element, part_here, working_parameter
from mcore_ckpt_ext.colossalai.loaded_masters import has_exact_masters, note_exact_masters
from mcore_ckpt_ext.colossalai.loss_scale import loss_scale, set_loss_scale
from mcore_ckpt_ext.colossalai.lost_states import MASTER, OURS, newest_step, stateless_note
from mcore_ckpt_ext.colossalai.ranks import Ranks
from mcore_ckpt_ext.errors import UnsupportedCheckpointError

_STEP = f"{MASTER}_step"
"""An entry of older files."""


@contextmanager
def masters_in_state(optimizer: Any, stages: Ranks | None = None) -> Iterator[None]:
    """In this context, add each master to the optimizer's state, and a note to its first group.

    Args:
        optimizer: the optimizer; the note has the loss scale, and which parameters have no state.
        stages: the ranks of all pipeline stages, which must call this; None if each rank has all parameters.
    """
    masters = list(_masters(optimizer))
    # Adagrad's first states are those of the parameters for which ColossalAI steps masters: nothing uses them.
    for former in set(optimizer.optim.state).difference(_step_tensors(optimizer)):
        del optimizer.optim.state[former]
    for master in masters:
        optimizer.optim.state[master][MASTER] = master.detach()
    group = optimizer.optim.param_groups[0]
    group[OURS] = {"loss_scale": scale} if (scale := loss_scale(optimizer)) else {}
    try:
        group[OURS] |= _note(optimizer, stages)
        yield
    finally:
        group.pop(OURS, None)
        for master in masters:
            _pop(optimizer, master)


def take(optimizer: Any) -> None:
    """Move loaded masters and the loss scale out of the optimizer's state.

    Stock ColossalAI keeps the masters of a file that it loaded, trains on and saves it again: then they are outdated,
    and do not round to the weights, which may be loaded later. So this is checked before the first step.
    """
    note = optimizer.optim.param_groups[0].pop(OURS, {})
    if "loss_scale" in note:
        set_loss_scale(optimizer, note["loss_scale"])
    masters = {id(master) for master in _masters(optimizer)}
    loaded = [(stepped, _pop(optimizer, stepped)) for stepped in _step_tensors(optimizer)]
    exact = {stepped: value for stepped, value in loaded if value is not None and id(stepped) in masters}
    for stepped, value in exact.items():
        stepped.data.copy_(value.view(stepped.shape))
    if exact:
        note_exact_masters(optimizer, optimizer, partial(_replace_outdated, optimizer, list(exact)))


def update_master_params(optimizer: Any, model: Any) -> None:
    """Update the masters like ColossalAI, but keep loaded masters that round to the weights."""
    if has_exact_masters(optimizer):
        _replace_outdated(optimizer, _masters(optimizer))
    else:
        optimizer._non_strict_update_master_params(model)


def _replace_outdated(optimizer: Any, masters: Iterable[torch.Tensor]) -> None:
    """Replace masters that do not round to their weights by these."""
    for master in masters:
        parameter = working_parameter(optimizer, master)
        weight = part_here(optimizer, parameter, parameter.detach())
        if not _rounds_to(master, weight):
            master.data.copy_(weight)


def _rounds_to(master: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if the weight is the rounded master; its file may be of a job in another precision."""
    through = dict.fromkeys((weight.dtype, torch.bfloat16, torch.float16))
    return any(torch.equal(master.to(dtype).to(weight), weight) for dtype in through)


def _note(optimizer: Any, stages: Ranks | None) -> dict[str, Any]:
    """Return the note of parameters without state, by their numbers in the file.

    Raises:
        UnsupportedCheckpointError: of `_describe_states`; with `stages` a ResumeRefusedError on all of these.
    """
    if stages is None:
        numbers = {stepped: number for number, stepped in enumerate(_step_tensors(optimizer))}
        with_state, step = _describe_states(optimizer, numbers)
        return stateless_note(numbers.values(), with_state, step)
    info = optimizer.param_info
    numbers = {p: info["param2id"][id(working_parameter(optimizer, p))] for p in _step_tensors(optimizer)}
    described = stages.agree(partial(_describe_states, optimizer, numbers), "saving the optimizer", NOT_WHOLE)
    of_stages, steps = zip(*described, strict=True)
    known = (key for group in info["param_groups"] for key in group["params"])
    return stateless_note(known, set().union(*of_stages), max(steps))


def _describe_states(optimizer: Any, numbers: Mapping[torch.Tensor, int]) -> tuple[set[int], float]:
    """Return the numbers of parameters with a state, and the newest step.

    Raises:
        UnsupportedCheckpointError: a state is neither a scalar nor has the shape of the parameter's part. ColossalAI's
            code gathers and shards each tensor like the parameter, and could take another for one.
    """
    states = {number: optimizer.optim.state.get(stepped, {}) for stepped, number in numbers.items()}
    for stepped, number in numbers.items():
        for name, value in states[number].items():
            if is_per_element(name, value, stepped) and value.shape != stepped.shape:
                raise UnsupportedCheckpointError(
                    f"{type(optimizer.optim).__name__} has a state of another shape than its parameter",
                    found=tuple(value.shape),
                    expected=tuple(stepped.shape),
                    where=f"{name} of parameter {number}",
                    hint="train with an optimizer without factored states, for example HybridAdam",
                )
    return {number for number, state in states.items() if state}, newest_step(states.values())


def _pop(optimizer: Any, stepped: torch.Tensor) -> torch.Tensor | None:
    """Remove and return a master's entry of the state, which has no other entries before the first step."""
    state = optimizer.optim.state.get(stepped, {})
    value: torch.Tensor | None = state.pop(MASTER, None)
    state.pop(_STEP, None)
    if not state:
        optimizer.optim.state.pop(stepped, None)
    return value


def _masters(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield masters, unless they are the weights (``master_weights=False``, or training in fp32)."""
    working = optimizer.get_master_to_working_map()
    if working is None or not getattr(optimizer, "_master_weights", True):
        return
    yield from (stepped for stepped in _step_tensors(optimizer) if working[id(stepped)] is not stepped)


def _step_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.optim.param_groups:
        yield from group["params"]
