"""Writes distributed optimizers into legacy files, as whole gradient buffers.

Sources: `DistributedOptimizer.get_parameter_state_dp_zero` and `ChainedOptimizer.save_parameter_state`,
megatron/core/optimizer, core_v0.9.0 to 0.19.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.formats.legacy.models import TargetModels
from mcore_ckpt_ext.formats.legacy.ranks import LegacyRank
from mcore_ckpt_ext.formats.portable_state import distinct_groups
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.releases import CLOSES_BUCKETS_AT_ALIGNED_ENDS, MATCHES_GROUPS_BY_SETTINGS
from mcore_ckpt_ext.layout.grad_buffer import PackingRule
from mcore_ckpt_ext.layout.local_model import ModelRank
from mcore_ckpt_ext.layout.packing_proposals import PackedBuffer, pack_buffers
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.optimizers.flat_arrays import KINDS
from mcore_ckpt_ext.planning.write_plan import WriteItem
from mcore_ckpt_ext.storage.pickling import DeclaredTensor

_STATE_NAMES = {kind: state for state, kind in KINDS.items()}


class FlatStates:
    """Lays out the state of each chained optimizer of a rank: its settings, and its gradient buffers."""

    def __init__(
        self, checkpoint: CheckpointView, models: TargetModels, layout: ParallelLayout, version: tuple[int, int]
    ) -> None:
        self._checkpoint = checkpoint
        self._models = models
        self._layout = layout
        self._version = version

    def settings(self, rank: LegacyRank) -> Any:
        """Return the rank's entry `optimizer`: the state of a single optimizer, or a list of several."""
        return _alone_or_all([self._settings(rank, child) for child in self._children])

    def buffers(self, rank: LegacyRank) -> Any:
        """Return the content of the rank's `distrib_optim.pt`; None if it has no such file.

        The first expert rank stores the state of the dense parameters.
        """
        states = [
            None if child == 0 and rank.expert > 0 else self._buffer_states(rank, child) for child in self._children
        ]
        return _alone_or_all(states) if any(state is not None for state in states) else None

    @property
    def _children(self) -> range:
        return range(2 if self._layout.expert > 1 else 1)

    def _settings(self, rank: LegacyRank, child: int) -> dict[str, Any]:
        """Return the parameter groups and the scaler of one chained optimizer."""
        groups = distinct_groups(self._checkpoint.optimizer.param_groups(), self._layout.expert > 1)[child]
        if not MATCHES_GROUPS_BY_SETTINGS.is_of(self._version):
            groups = self._sort_by_first_use(groups, rank, child)
        settings: dict[str, Any] = {"optimizer": {"param_groups": groups}}
        scaler = self._checkpoint.optimizer.grad_scaler()
        return settings if scaler is None else {**settings, "grad_scaler": scaler}

    def _sort_by_first_use(
        self, groups: Sequence[dict[str, Any]], rank: LegacyRank, child: int
    ) -> list[dict[str, Any]]:
        """Sort groups by their first parameter on this rank, because 0.13 and older load them by position.

        Biases and arrays with one axis have no weight decay (`_get_param_groups`, megatron/core/optimizer/__init__.py).
        """
        multipliers = [group.get("wd_mult", group.get("pre_wd_mult")) for group in groups]
        if sorted(multipliers, key=repr) not in ([0.0, 1.0], [1.0], [0.0]):
            raise UnsupportedCheckpointError(
                "the order of these parameter groups in a legacy file is unknown",
                found=quantity(len(groups), "group"),
                expected="one with and one without weight decay",
                hint="write for --megatron-version 0.14 or later",
            )
        weights = self._models.local.weights
        used: list[float] = []
        for buffer in self._pack(rank, child):
            for name in buffer.names:
                plain = name.endswith(".bias") or len(weights[name].tensor.shape) == 1
                used.append(0.0 if plain else 1.0)
        order = list(dict.fromkeys(used))
        by_multiplier = dict(zip(multipliers, groups, strict=True))
        return [by_multiplier[value] for value in order if value in by_multiplier]

    def _pack(self, rank: LegacyRank, child: int) -> list[PackedBuffer]:
        experts = child == 1
        tensor = rank.tensor % self._layout.expert_tensor if experts else rank.tensor
        place = ModelRank(rank.pipeline, tensor, rank.expert if experts else None)
        is_later = CLOSES_BUCKETS_AT_ALIGNED_ENDS.is_of(self._version)
        rule = PackingRule.SINCE_0_13 if is_later else PackingRule.UNTIL_0_12
        packed = pack_buffers(self._models.local, self._models.order, rule, place, self._models.stages)
        if packed is None:
            raise UnsupportedCheckpointError(
                "the packing of the gradient buffers under that layout is unknown", where=str(place)
            )
        for buffer in packed:
            check_within_buckets(buffer, place)
        return packed

    def _buffer_states(self, rank: LegacyRank, child: int) -> dict[Any, Any]:
        """Return the state of `get_parameter_state_dp_zero`: buffers' buckets without padding at their ends."""
        state: dict[Any, Any] = {"buckets_coalesced": True}
        # Buffers are numbered across all chunks of the optimizer; a chunk without experts has no buffer for them.
        for number, buffer in enumerate(self._pack(rank, child)):
            numel = sum(bucket.numel_unpadded for bucket in buffer.buckets)
            arrays: dict[str, Any] = {
                _STATE_NAMES.get(kind, kind): DeclaredTensor(torch.float32, (numel,), self._content(buffer, kind))
                for kind in self._checkpoint.optimizer.state().carried_kinds
            }
            state[number] = {_dtypes(buffer): {**arrays, "numel_unpadded": numel}}
        return state

    def _content(self, buffer: PackedBuffer, kind: str) -> tuple[WriteItem, ...]:
        placed = []
        for origin, bucket in zip(buffer.joined_origins(), buffer.buckets, strict=True):
            for index, start, _ in bucket.placements:
                target_slice = self._models.state_in_buffer(kind, buffer.names[index], buffer.regions[index])
                placed.append(WriteItem(origin + start, target_slice))
        return tuple(sorted(placed, key=lambda part: part.start))


def check_within_buckets(buffer: PackedBuffer, place: ModelRank) -> None:
    """Refuse a buffer with a parameter that starts before its bucket: Megatron cannot run such a layout.

    Up to 0.12, the shared embedding starts where the bucket before it is closed without its padding, if the data
    parallel size divides that position (`_ParamAndGradBuffer.__init__`, param_and_grad_buffer.py, core_v0.7.0 to
    0.12.3). The rank with the end of that bucket then has elements of the embedding in two buckets, and the job ends in
    "each param only belongs to a single bucket" (`_build_model_param_gbuf_map`, distrib_optimizer.py, the same
    releases; run with 0.12.1). `PackingRule` has more.

    Raises:
        UnsupportedCheckpointError: there is such a parameter.
    """
    for bucket in buffer.buckets:
        for index, start, _ in bucket.placements:
            if start < 0:
                raise UnsupportedCheckpointError(
                    "Megatron before 0.13 cannot run that layout: its shared embedding would lie in two buckets",
                    found=f"{quantity(-start, 'element')} of {buffer.names[index]} before the start of their bucket",
                    where=str(place),
                    hint="write for --megatron-version 0.13 or later, or choose another pipeline or tensor size",
                )


def _alone_or_all(states: list[Any]) -> Any:
    """Return a single state itself and several as a list, as Megatron stores them."""
    return states if len(states) > 1 else states[0]


def _dtypes(buffer: PackedBuffer) -> tuple[torch.dtype, ...]:
    """Return Megatron's key of a buffer, its (parameter, gradient) dtypes."""
    return tuple(getattr(torch, name.strip().removeprefix("torch.")) for name in buffer.dtypes.strip("()").split(","))
