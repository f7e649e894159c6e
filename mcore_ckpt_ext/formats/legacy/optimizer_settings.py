"""The settings of optimizers in legacy files, from all ranks: groups, steps and the gradient scaler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from mcore_ckpt_ext.formats.legacy.ranks import RankState
from mcore_ckpt_ext.formats.portable_state import inner_state, once, portable_child, portable_group, several_steps
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.storage.torch_archive import TorchArchive


class OptimizerSettings:
    """The optimizer state of all ranks that is not a tensor of a parameter."""

    def __init__(self, ranks: Sequence[RankState], archive: Callable[[RankState], TorchArchive], where: str) -> None:
        """Keep the sources; settings are read on request.

        Args:
            ranks: the stored state of each rank, the first pipeline rank first.
            archive: opens the file of a rank.
            where: the checkpoint, for messages.
        """
        self._ranks = ranks
        self._archive = archive
        self._where = where

    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups as each rank stored them, with repetitions."""
        return [
            {**self._step_count(number), **group}
            for rank in self._ranks
            for number, child in enumerate(rank.optimizers)
            for group in child.get("optimizer", child).get("param_groups", [])
        ]

    def _step_count(self, number: int) -> dict[str, Any]:
        """Return the step of a chained optimizer if it is stored by parameter and not in a group."""
        step = self._steps_of_parameters.get(number)
        return {} if step is None else {"step": int(step)}

    def chained_optimizer_settings(self) -> list[dict[str, Any]]:
        """Return the settings of each chained optimizer, see `StoredOptimizer.chained_optimizer_settings`.

        A stage lacks groups that contain none of its parameters, so the groups of all ranks are merged.
        """
        return [self._portable(number, child) for number, child in enumerate(self._ranks[0].optimizers)]

    def _portable(self, number: int, child: Mapping[str, Any]) -> dict[str, Any]:
        step = self._steps_of_parameters.get(number)
        of_ranks = [rank.optimizers[number] for rank in self._ranks if number < len(rank.optimizers)]
        groups = [group for optimizer in of_ranks for group in inner_state(optimizer)["param_groups"]]
        inner = {
            "param_groups": once(map(portable_group, groups)),
            "state": {} if step is None else {"common_step": torch.tensor(step)},
        }
        if "optimizer" not in child:
            return portable_child(inner)
        scaler = {"grad_scaler": self.grad_scaler()} if child.get("grad_scaler") else {}
        return portable_child({"optimizer": inner, **scaler})

    @cached_property
    def _steps_of_parameters(self) -> dict[int, float]:
        """The step that torch's Adam stores for each parameter (torch/optim/adam.py), by chained optimizer.

        Raises:
            UnreadableCheckpointError: parameters of one optimizer have different steps.
        """
        by_optimizer: dict[int, dict[float, str]] = {}
        for rank in self._ranks:
            for number, child in enumerate(rank.optimizers):
                state = inner_state(child).get("state") or {}
                for parameter, kept in state.items():
                    step = self._archive(rank).with_values(kept.get("step")) if isinstance(kept, dict) else None
                    if step is not None:
                        by_optimizer.setdefault(number, {}).setdefault(
                            float(step), f"parameter {parameter} of {rank.folder}"
                        )
        for steps in by_optimizer.values():
            if len(steps) > 1:
                raise several_steps(steps, self._where)
        return {number: next(iter(steps)) for number, steps in by_optimizer.items()}

    def grad_scaler(self) -> dict[str, Any] | None:
        """Return the state of the gradient scaler; None if there is none."""
        first = self._ranks[0]
        scalers = [child["grad_scaler"] for child in first.optimizers if child.get("grad_scaler")]
        # The scale is a tensor, so its value has to be read.
        return dict(self._archive(first).with_values(scalers[0])) if scalers else None
