"""LowLevelZeroPlugin, ZeRO stages 1 and 2: masters and loss scale in the optimizer's files, for exact resumes.

ColossalAI (0.5.0, zero/low_level/low_level_optim.py) saves the moments whole and cuts them again under any number of
ranks, but neither the fp32 masters nor the loss scale: after a resume the masters are the rounded weights. Here they
travel as one more state of each parameter, gathered and cut by ColossalAI's own code. Stock loads such files, too: an
entry that its optimizer never reads.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mcore_ckpt_ext.zero_strict_state_dict.optimizer import MASTER, OURS, loss_scale, set_loss_scale

_BROUGHT = "_mcore_ckpt_ext_brought"


class LowLevelZeroMethods:
    """For LowLevelZeroOptimizer."""

    _non_strict_state_dict: Any
    _non_strict_state_dict_shard: Any
    _non_strict_load_state_dict: Any
    _non_strict_update_master_params: Any

    def state_dict(self, *positional: Any, **keywords: Any) -> dict[str, Any]:
        """As ColossalAI, with the masters and the loss scale; all ranks must call this."""
        with _beside_the_state(self):
            return dict(self._non_strict_state_dict(*positional, **keywords))

    def state_dict_shard(self, *positional: Any, **keywords: Any) -> Generator[tuple[dict[int, Any], int]]:
        """As ColossalAI, with the masters."""
        with _beside_the_state(self):
            yield from self._non_strict_state_dict_shard(*positional, **keywords)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ColossalAI; and the masters and the loss scale, where the dict has them."""
        self._non_strict_load_state_dict(state_dict)
        _take(self)

    def update_master_params(self, model: Any) -> None:
        """As ColossalAI; but masters that the optimizer's file brought, and that round to the weights, stay exact."""
        exact = {}
        if vars(self).get(_BROUGHT) == _steps(self):
            exact = {master: master.detach().clone() for master in _masters(self)}
        self._non_strict_update_master_params(model)
        for master, value in exact.items():
            working = self.master_to_working_param[id(master)]  # type: ignore[attr-defined]  # ColossalAI's own
            if torch.equal(value.to(working.dtype).to(master.dtype), master):
                master.data.copy_(value)


class LowLevelZeroCheckpointIOMethods:
    """For LowLevelZeroCheckpointIO, whose sharded files go past the optimizer's own methods."""

    _non_strict_save_sharded_optimizer: Any
    _non_strict_load_sharded_optimizer: Any

    def save_sharded_optimizer(self, optimizer: Any, *positional: Any, **keywords: Any) -> None:
        """As ColossalAI, with the masters and the loss scale."""
        with _beside_the_state(optimizer):
            self._non_strict_save_sharded_optimizer(optimizer, *positional, **keywords)

    def load_sharded_optimizer(self, optimizer: Any, *positional: Any, **keywords: Any) -> None:
        """As ColossalAI; and the masters and the loss scale, where the files have them."""
        self._non_strict_load_sharded_optimizer(optimizer, *positional, **keywords)
        _take(optimizer)


@contextmanager
def _beside_the_state(optimizer: Any) -> Iterator[None]:
    """For the time of a save, show each master as a state of its own, and the loss scale in the first group."""
    masters = list(_masters(optimizer)) if optimizer._master_weights else []
    for master in masters:
        optimizer.optim.state[master][MASTER] = master.detach()
    group = optimizer.optim.param_groups[0]
    group[OURS] = {"loss_scale": scale} if (scale := loss_scale(optimizer)) else {}
    try:
        yield
    finally:
        group.pop(OURS, None)
        for master in masters:
            _popped(optimizer, master)


def _take(optimizer: Any) -> None:
    """Move what came beside the state to where it belongs."""
    note = optimizer.optim.param_groups[0].pop(OURS, {})
    if "loss_scale" in note:
        set_loss_scale(optimizer, note["loss_scale"])
    for master in _masters(optimizer):
        value = _popped(optimizer, master)
        if value is not None and optimizer._master_weights:
            master.data.copy_(value.view(master.shape))
            vars(optimizer)[_BROUGHT] = _steps(optimizer)


def _popped(optimizer: Any, master: torch.Tensor) -> torch.Tensor | None:
    """A master's entry, taken out of the state; before the first step there is nothing else in it."""
    state = optimizer.optim.state.get(master, {})
    value: torch.Tensor | None = state.pop(MASTER, None)
    if not state:
        optimizer.optim.state.pop(master, None)
    return value


def _masters(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.optim.param_groups:
        yield from group["params"]


def _steps(optimizer: Any) -> tuple[int, ...]:
    states = (optimizer.optim.state.get(master, {}) for master in _masters(optimizer))
    return tuple(int(state.get("step", 0)) for state in states)
