"""Legacy optimizer state without DistributedOptimizer: every rank's masters and moments, one tensor a parameter.

Source: `Float16OptimizerWithFloat16Params.state_dict`, megatron/core/optimizer/optimizer.py, core_v0.7.0 to 0.19.2:
`fp32_from_fp16_params` lists the masters group by group, each group in the order in which its parameters were
registered, and `optimizer` is torch's own dict, whose ids count through the groups. Which parameter is in which group
is not recorded: each weight takes the next master of the group whose next master rounds to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt_ext.errors import LayoutError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.dcp_index import StoredObject, extent_of
from mcore_ckpt_ext.formats.flat_buffers import FlatArray, FlatPiece
from mcore_ckpt_ext.formats.legacy_weights import LegacyWeights, RankArrays
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.proof import first_mismatch
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, FP32_PARAM
from mcore_ckpt_ext.storage.safe_pickle import TensorReference
from mcore_ckpt_ext.transfer import Transfer, read_slice

NAME = "legacy_torch_per_parameter"
MASTERS = "fp32_from_fp16_params"
_MOMENTS = (EXP_AVG, EXP_AVG_SQ)
_SAMPLE = 64


@dataclass(frozen=True)
class RankOptimizers:
    """The chained optimizers of one rank, and its parameters in registration order; tensors lie in `place`."""

    tensor: int
    place: StoredObject
    optimizers: Sequence[Mapping[str, Any]]
    parameters: Sequence[tuple[str, TensorReference]]


def rank_optimizers(weights: LegacyWeights, optimizers_of: Mapping[str, Sequence[Any]]) -> list[RankOptimizers]:
    """What each rank folder holds; `optimizers_of` is by the file of the rank's archive."""
    parameters: dict[str, list[tuple[str, TensorReference]]] = {}
    found: dict[str, RankOptimizers] = {}
    for rank, named in weights.models:
        file = rank.place.file
        own = parameters.setdefault(file, [])
        own.extend(named)
        found[file] = RankOptimizers(rank.tensor, rank.place, optimizers_of[file], own)
    return list(found.values())


class LegacyMasters(RankArrays):
    """The optimizer state of a checkpoint, in model space; see `formats.base.OptimizerState`."""

    kinds: tuple[str, ...] = (FP32_PARAM, *_MOMENTS)

    def __init__(
        self,
        ranks: Iterable[RankOptimizers],
        arguments: Mapping[str, Any],
        layout: ParallelLayout,
        transfer: Transfer,
    ) -> None:
        """Raises: LayoutError, when the masters cannot be told apart; UnsupportedCheckpointError, see `_queue`."""
        super().__init__(arguments, layout)
        self._transfer = transfer
        for rank in ranks:
            self._add_rank(rank)

    def names(self) -> list[str]:
        """All parameters with optimizer state."""
        return [name for kind, name in self._tensors if kind == FP32_PARAM]

    def witnesses(self) -> list[str]:
        """Where the layout is known from."""
        return ["the order of the stored masters"]

    def lost_elements(self) -> dict[str, int]:
        """Nothing is lost."""
        return {}

    def _add_rank(self, rank: RankOptimizers) -> None:
        queues = [queue for optimizer in rank.optimizers for queue in _queues(optimizer, rank.place.file)]
        for name, weight in rank.parameters:
            fitting = [queue for queue in queues if queue and self._fits(queue[0][FP32_PARAM], weight, rank.place)]
            if len(fitting) > 1:
                raise self._ambiguous(f"{len(fitting)} groups have a master for it", name, rank)
            for kind, tensor in fitting[0].popleft().items() if fitting else ():  # without one: it is not trained
                self.add(kind, name, tensor, rank.tensor, rank.place)
        if left := sum(map(len, queues)):
            raise self._ambiguous(f"{left} masters fit no weight", "the stored model", rank)

    def _ambiguous(self, found: str, name: str, rank: RankOptimizers) -> LayoutError:
        return LayoutError(
            "it cannot be told which master belongs to which weight",
            found=found,
            where=f"{name}, {rank.place.file}",
            helps="the checkpoint is damaged or its weights were edited after the save: use another iteration",
        )

    def _fits(self, master: TensorReference, weight: TensorReference, place: StoredObject) -> bool:
        if master.shape != weight.shape:
            return False
        return first_mismatch(self._sample(master, place), self._sample(weight, place)) is None

    def _sample(self, tensor: TensorReference, place: StoredObject) -> torch.Tensor:
        region = Region.whole("sample", tensor.shape)
        extent = extent_of(tensor, place)
        array = FlatArray(region.numel, extent.dtype, (FlatPiece(0, region.numel, extent, tensor.offset),))
        flat = Region.whole("sample", (region.numel,))
        return read_slice(array, self._transfer, FP32_PARAM, Slice((flat,), 0, min(region.numel, _SAMPLE)))


def _queues(optimizer: Mapping[str, Any], where: str) -> list[deque[dict[str, TensorReference]]]:
    """The state of each group's parameters, in order.

    Raises:
        UnsupportedCheckpointError: fp32 training, or an optimizer other than Adam with its step in the group.
    """
    masters, inner = optimizer.get(MASTERS), optimizer.get("optimizer", {})
    groups, state = inner.get("param_groups", []), inner.get("state", {})
    queues = []
    for group, own in zip(groups, masters or [], strict=False):
        entries = [state.get(number, {}) for number in group["params"]]
        queues.append(
            deque(
                {FP32_PARAM: master, **{kind: entry[kind] for kind in _MOMENTS if kind in entry}}
                for master, entry in zip(own, entries, strict=False)
            )
        )
        complete = all(len(item) == 1 + len(_MOMENTS) for item in queues[-1])
        if len(own) != len(entries) or not complete or "step" not in group:
            masters = None
    if masters is None or len(masters) != len(groups):
        raise UnsupportedCheckpointError(
            "the optimizer state of this legacy checkpoint is not that of mixed-precision training with fused Adam",
            expected=f"{MASTERS}, exp_avg and exp_avg_sq of every parameter, and a step in each group",
            where=where,
            helps="resume it once under its own layout, and save with --use-distributed-optimizer",
        )
    return queues
