"""DistributedOptimizer with masters in Transformer Engine's FusedAdam (precision-aware optimizer).

Attributes used: `get_unscaled_state`, `set_scaled_state`, `state`, `store_param_remainders` of FusedAdam
(transformer_engine/pytorch/optimizers/fused_adam.py, 2.1 to 2.20.2), and `config`, `model_chunks` of
DistributedOptimizer (megatron/core/optimizer/distrib_optimizer.py, core_v0.13.1 to 0.19.2). FusedAdam steps the bf16
shard itself. Its state has the master: whole in fp32 or scaled fp16, or as the trailing 16 bits in int16 (see
`optimizers.remainders`). With fp8 recipes other than delayed scaling Megatron keeps the masters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from mcore_ckpt_ext.layout.master_check import WITHIN_FP16, MasterCheck
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import LiveShard
from mcore_ckpt_ext.megatron.live.optimizer_adapters.distributed import DistributedAdapter
from mcore_ckpt_ext.megatron.live.optimizer_adapters.plain import PlainAdapter
from mcore_ckpt_ext.optimizers.remainders import join, split

_MASTER = "master_param"


def keeps_halves(optimizer: Any) -> bool:
    """Return True if the fused optimizer has masters in fp16 (`--main-params-dtype fp16`)."""
    return bool(getattr(optimizer.config, "main_params_dtype", torch.float32) == torch.float16)


class PrecisionAwareAdapter(DistributedAdapter):
    """Adapter for masters and moments that the fused optimizer itself keeps, in dtypes of its choice."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._fused = optimizer.optimizer

    @property
    @override
    def kind(self) -> str:
        return f"masters in the fused optimizer{' as remainders' if self._fused.store_param_remainders else ''}"

    def master_check(self, shard: LiveShard) -> MasterCheck | None:
        """Return the comparison of masters and weights; None with remainders, where every pair is valid."""
        if self._has_remainder(shard):
            return None
        is_half = keeps_halves(self._optimizer) and self._is_inside(shard)
        return WITHIN_FP16 if is_half else super().master_check(shard)

    @override
    def master(self, shard: LiveShard) -> torch.Tensor:
        stepped = self._step_tensor(shard).detach()
        if not self._is_inside(shard):
            return stepped.view(-1)
        if _MASTER not in self._fused.state.get(self._step_tensor(shard), {}):
            return stepped.view(-1).float()  # the first step starts from the weights
        kept = self._fused.get_unscaled_state(self._step_tensor(shard), _MASTER).view(-1)
        return join(stepped.view(-1), kept) if kept.dtype == torch.int16 else kept

    def set_master(self, shard: LiveShard, values: torch.Tensor) -> torch.Tensor:
        """Take masters. With remainders, the caller writes the weights, see `rounded`."""
        stepped = self._step_tensor(shard)
        masters = values
        if self._has_remainder(shard):
            masters = split(values)[1]
        elif not self._is_inside(shard):
            stepped.detach().view(-1).copy_(values)
        if self._keeps_masters:
            # `set_scaled_state` may scale its argument in place.
            self._fused.set_scaled_state(stepped, _MASTER, masters.view(stepped.shape).clone())
        return values

    def round_masters(self, shard: LiveShard, values: torch.Tensor) -> torch.Tensor:
        """Return the weights for masters; a remainder requires a weight that is rounded half up."""
        return split(values)[0] if self._has_remainder(shard) else super().round_masters(shard, values)

    def keep(self, shard: LiveShard, kind: str, values: torch.Tensor) -> None:
        """Store moments in their own dtype, with their scale."""
        stepped = self._step_tensor(shard)
        self._fused.set_scaled_state(stepped, kind, values.view(stepped.shape))

    def finish(self, groups: Sequence[Mapping[str, Any]], scaler: Mapping[str, Any] | None) -> None:
        """Set the groups and the scaler; the optimizer's own loading fails with remainders in core_v0.16.1."""
        PlainAdapter.finish(self, groups, scaler)

    @property
    def _keeps_masters(self) -> bool:
        config = self._optimizer.config
        return bool(getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", True))

    def _is_inside(self, shard: LiveShard) -> bool:
        return self._keeps_masters and self._step_tensor(shard).dtype != torch.float32

    def _has_remainder(self, shard: LiveShard) -> bool:
        remainders = self._fused.store_param_remainders and self._step_tensor(shard).dtype == torch.bfloat16
        return bool(self._keeps_masters and remainders)

    def _check(self, shard: LiveShard) -> None:
        if not self._is_inside(shard):
            super()._check(shard)
