"""DistributedOptimizer with plain fp32 masters: Adam of Apex, Transformer Engine and torch, Lion.

Attributes used, present from core_v0.7.0 to 0.19.2 in megatron/core/optimizer/distrib_optimizer.py:
`gbuf_ranges[buffer][dtypes][bucket]["param_map"][param]["param"]`, `model_param_group_index_map`,
`optimizer.param_groups`, `optimizer.state`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.megatron.live.model import LiveParameter
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import LiveShard
from mcore_ckpt_ext.megatron.live.optimizer_adapters.inner_optimizers import kept_by
from mcore_ckpt_ext.megatron.live.optimizer_adapters.plain import PlainAdapter, find_live_parameter
from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ
from mcore_ckpt_ext.optimizers.groups import BOUNDS


class DistributedAdapter(PlainAdapter):
    """Adapter for masters and moments that `DistributedOptimizer` shards over data-parallel ranks."""

    @property
    def kind(self) -> str:
        """How masters are kept, in words; the same on all ranks that have such an adapter."""
        return "whole masters"

    @property
    def is_first_replica(self) -> bool:
        """True if no other rank reports the same about the model."""
        return bool(self._optimizer.data_parallel_group.rank() == 0)

    def shards(self, live: Mapping[int, LiveParameter]) -> Iterator[LiveShard]:
        """Yield the shards of this rank."""
        for buckets in (b for ranges in self._optimizer.gbuf_ranges for b in ranges.values()):
            for parameter, ranges in (item for bucket in buckets for item in bucket["param_map"].items()):
                live_parameter = find_live_parameter(live, parameter)
                local = Slice(live_parameter.regions, ranges["param"].start, ranges["param"].end)
                shard = LiveShard(live_parameter, local, self._kinds, self)
                self._check(shard)
                yield shard

    def share_weights(self) -> None:
        """Gather the parameters as after a step.

        Source: `DistributedDataParallel.start_param_sync` (core_v0.8.0 to 0.19.2).
        """
        for chunk in self._optimizer.model_chunks:
            chunk.start_param_sync(force_sync=True)

    def finish(self, groups: Sequence[Mapping[str, Any]], scaler: Mapping[str, Any] | None) -> None:
        """Set the groups through the optimizer's own `load_state_dict`, which sets torch's Adam's step.

        Since core_v0.19.0 it also finds the groups by their bounds (`param_group_identifier_keys`, optimizer.py): it
        gets the bounds of the live groups, which a new learning rate has changed, and the stored ones are set
        afterwards. From core_v0.14.0 to 0.18.2 it takes groups that differ in bounds only (--decoupled-lr) for one, so
        that all settings are set afterwards.
        """
        with_live_bounds = [{**group, **_bounds(live)} for live, group in zip(self.param_groups, groups, strict=True)]
        state: dict[str, Any] = {"optimizer": {"param_groups": with_live_bounds}}
        if scaler is not None:
            state["grad_scaler"] = scaler
        self._optimizer.load_state_dict(state)
        for live, group in zip(self.param_groups, groups, strict=True):
            live.update({key: value for key, value in group.items() if key in live and key != "params"})

    @property
    def _kinds(self) -> tuple[str, ...]:
        """The kinds of state that the inner optimizer keeps, whatever the job's optimizer is called.

        In a job with a layer-wise Lion or SOAP, Adam steps the other parameters, but `optimizer_state_keys`
        (core_v0.19.0 to 0.19.2 and the development head of August 2026) lists the kinds of the job's optimizer.
        """
        return kept_by(self._optimizer.optimizer) or tuple(
            getattr(self._optimizer, "optimizer_state_keys", (EXP_AVG, EXP_AVG_SQ))
        )

    @override
    def _step_tensor(self, shard: LiveShard) -> torch.Tensor:
        group, order = self._optimizer.model_param_group_index_map[shard.live.parameter]
        stepped: torch.Tensor = self._optimizer.optimizer.param_groups[group]["params"][order]
        return stepped

    def _check(self, shard: LiveShard) -> None:
        main = self._kept_masters(shard)
        if main.dtype != torch.float32 or main.numel() != shard.slice.numel or not main.is_contiguous():
            raise UnsupportedCheckpointError(
                "the optimizer's masters are not plain fp32 shards",
                found=f"{main.dtype}, {quantity(main.numel(), 'element')}",
                expected=f"torch.float32, {quantity(shard.slice.numel, 'element')}",
                where=shard.name,
            )


def _bounds(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in BOUNDS if key in group}
