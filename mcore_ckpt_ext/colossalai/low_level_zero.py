"""LowLevelZeroPlugin, ZeRO stages 1 and 2: saves masters and loss scale for exact resumes.

ColossalAI (0.5.0, zero/low_level/low_level_optim.py) gathers the moments to save them and shards them again under any
number of ranks, but saves neither the fp32 masters nor the loss scale: after a resume the masters are the rounded
weights. Here the masters are an additional state of each parameter, which ColossalAI's own code gathers and shards.
Stock ColossalAI loads such files, too: its optimizer ignores the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mcore_ckpt_ext.colossalai import master_state
from mcore_ckpt_ext.colossalai.asynchronous import former_save_finished
from mcore_ckpt_ext.colossalai.hybrid_cuts import is_per_element, part_here, refuse_loaded_shapes
from mcore_ckpt_ext.colossalai.hybrid_loading import accept_states, load_model
from mcore_ckpt_ext.colossalai.lost_states import PADDING, drop_outdated
from mcore_ckpt_ext.colossalai.master_state import masters_in_state, take
from mcore_ckpt_ext.colossalai.optimizer import State
from mcore_ckpt_ext.colossalai.ranks import Ranks
from mcore_ckpt_ext.colossalai.reading import load_states, read_by_all, read_optimizer_by_all, read_sharded_by_all
from mcore_ckpt_ext.colossalai.replaced import ReplacedMethods
from mcore_ckpt_ext.errors import ModelMismatchError


class LowLevelZeroMethods(ReplacedMethods):
    """Methods that replace those of LowLevelZeroOptimizer."""

    def state_dict(self, *positional: Any, **keywords: Any) -> dict[str, Any]:
        """Return ColossalAI's dict, with the masters and the loss scale; all ranks must call this."""
        with masters_in_state(self), _scalars_aside(self) as add_scalars:
            whole = dict(self._non_strict_state_dict(*positional, **keywords))
            add_scalars(whole["state"])
            return whole

    def state_dict_shard(self, *positional: Any, **keywords: Any) -> Generator[tuple[dict[int, Any], int]]:
        """Yield ColossalAI's shards, with the masters."""
        with masters_in_state(self), _scalars_aside(self) as add_scalars:
            for shard, size in self._non_strict_state_dict_shard(*positional, **keywords):
                add_scalars(shard)
                yield shard, size

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like ColossalAI, with masters and loss scale if saved, once all ranks accept the dict."""
        from colossalai.zero.low_level._utils import get_nd_world_size

        state_dict = dict(drop_outdated(state_dict))
        parameters: dict[int, Any] = {}

        def inspect_here() -> Iterable[int]:
            parameters.update(_parameters_by_id(self, state_dict))
            return parameters

        # Tensor-parallel ranks, whose dicts differ, may call this themselves (HybridParallelZeroOptimizer).
        is_same = all(get_nd_world_size(group) == dist.get_world_size() for group in self.pg_to_param_list)
        accept_states(Ranks(), "optimizer.load_state_dict", state_dict, inspect_here, is_same=is_same)
        states = {key: self._part_of(parameters[key], state) for key, state in state_dict["state"].items()}
        with _same_groups(self):
            self.optim.load_state_dict({**state_dict, "state": states})
        take(self)

    def _part_of(self, parameter: Any, state: State) -> State:
        """Return this rank's part of the state of a parameter, in memory of its own."""
        return {
            name: part_here(self, parameter, value).clone() if is_per_element(name, value, parameter) else value
            for name, value in state.items()
            if not name.endswith(PADDING)
        }

    update_master_params = master_state.update_master_params


class LowLevelZeroCheckpointIOMethods(ReplacedMethods):
    """Methods for LowLevelZeroCheckpointIO, whose sharded files bypass the optimizer's methods."""

    def save_unsharded_optimizer(
        self, optimizer: Any, checkpoint: str, gather_dtensor: bool = False, use_async: bool = False
    ) -> None:
        """Save like ColossalAI; the optimizer's `state_dict` has the masters and the loss scale."""
        with former_save_finished(self, optimizer, Ranks(), checkpoint, use_async=use_async):
            self._non_strict_save_unsharded_optimizer(optimizer, checkpoint, gather_dtensor, use_async)

    def save_sharded_optimizer(
        self,
        optimizer: Any,
        checkpoint: str,
        gather_dtensor: bool = False,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Save like ColossalAI, with the masters and the loss scale."""
        from colossalai.checkpoint_io.utils import get_optimizer_base_filenames

        base, index, _ = get_optimizer_base_filenames(prefix, use_async)
        finished = former_save_finished(self, optimizer, Ranks(), checkpoint, (base, index), use_async)
        with finished, masters_in_state(optimizer):
            self._non_strict_save_sharded_optimizer(
                optimizer, checkpoint, gather_dtensor, prefix, size_per_shard, use_async
            )

    def load_unsharded_optimizer(self, optimizer: Any, checkpoint: str, *_: Any, **__: Any) -> None:
        """Load like ColossalAI; all ranks refuse a file that one rank cannot read."""
        optimizer.load_state_dict(read_by_all(Ranks(), Path(checkpoint), load_states))

    def load_sharded_optimizer(self, optimizer: Any, index_file_path: Path, *_: Any, **__: Any) -> None:
        """Load all files as one state, so that it is checked as a whole; with masters and loss scale."""
        optimizer.load_state_dict(read_optimizer_by_all(Ranks(), Path(index_file_path)))

    def load_sharded_model(
        self, model: Any, checkpoint_index_file: Path, strict: bool = False, *more: Any, **keywords: Any
    ) -> None:
        """Load all files as one state dict, so that it is checked as a whole."""
        if isinstance(model.unwrap(), nn.Module):
            ranks = Ranks()
            entries = read_sharded_by_all(ranks, Path(checkpoint_index_file))
            load_model(ranks, model, entries, strict, is_sharded=True)
        else:
            self._non_strict_load_sharded_model(model, checkpoint_index_file, strict, *more, **keywords)

    def load_unsharded_model(
        self, model: Any, checkpoint: str, strict: bool = True, *more: Any, **keywords: Any
    ) -> None:
        """Load like ColossalAI, but check the file on all ranks before anything is written."""
        if isinstance(model.unwrap(), nn.Module):
            ranks = Ranks()
            load_model(ranks, model, read_by_all(ranks, Path(checkpoint)), strict, is_sharded=False)
        else:
            self._non_strict_load_unsharded_model(model, checkpoint, strict, *more, **keywords)


def _parameters_by_id(optimizer: Any, state_dict: Mapping[str, Any]) -> dict[int, Any]:
    """Return the working parameters by their ids in a state dict, if it fits them.

    Raises:
        ModelMismatchError: other parameters, or a state of another shape.
    """
    groups = state_dict["param_groups"]
    live = optimizer.optim.param_groups
    sizes, expected = ([len(group["params"]) for group in some] for some in (groups, live))
    ids = [key for group in groups for key in group["params"]]
    unknown = sorted(set(state_dict["state"]).difference(ids))
    if sizes != expected or unknown:
        raise ModelMismatchError(
            "the optimizer state belongs to other parameters",
            found=f"state of parameter {unknown[0]}" if sizes == expected else f"groups of {sizes}",
            expected=f"groups of {expected}",
        )
    stepped = (master for group in live for master in group["params"])
    parameters = {key: optimizer.master_to_working_param[id(master)] for key, master in zip(ids, stepped, strict=True)}
    for key, state in state_dict["state"].items():
        refuse_loaded_shapes(key, state, parameters[key])
    return parameters


@contextmanager
def _scalars_aside(optimizer: Any) -> Iterator[Callable[[dict[int, State]], None]]:
    """Take scalars, as NAdam's, out of the states; the function of this context adds them to saved ones.

    ColossalAI gathers every tensor that is not named ``step`` (0.5.0, zero/low_level/low_level_optim.py).
    """
    states = [optimizer.optim.state.get(p, {}) for group in optimizer.optim.param_groups for p in group["params"]]
    aside = [{name: value for name, value in state.items() if _is_scalar(name, value)} for state in states]
    for state, scalars in zip(states, aside, strict=True):
        for name in scalars:
            del state[name]

    def add_scalars(saved: dict[int, State]) -> None:
        for number, state in saved.items():
            state.update((name, value.clone().cpu()) for name, value in aside[number].items())

    try:
        yield add_scalars
    finally:
        for state, scalars in zip(states, aside, strict=True):
            state.update(scalars)


def _is_scalar(name: str, value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and name != "step"


@contextmanager
def _same_groups(optimizer: Any) -> Iterator[None]:
    """Load param groups into the present dicts, which torch would replace.

    ColossalAI replaces Lamb, CAME and Adafactor by optimizers of its own (0.5.0, nn/optimizer/__init__.py:
    ``cast_to_distributed``), which have only these dicts in common with the optimizer that a scheduler steps.
    """
    groups = list(optimizer.optim.param_groups)
    yield
    loaded = [dict(group) for group in optimizer.optim.param_groups]
    for group, content in zip(groups, loaded, strict=True):
        group.clear()
        group.update(content)
    optimizer.optim.param_groups[:] = groups
