"""LayerWiseDistributedOptimizer: each parameter is on one data-parallel rank (`dist_muon`).

Attributes used, of megatron/core/optimizer/layer_wise_optimizer.py: `pg_collection.dp_cp`, `pg_collection.expt_dp`,
`allgather_params` (core_v0.16.0 to 0.19.2 and the development head of August 2026); `use_buffer_param_sync`,
`model_chunks` (since core_v0.19.0), `use_fp8_param_sync`, and its children's `_optimizer_state_offloader` (development
head). Releases differ in which rank steps which parameter (by size in turn, or by place in the gradient buffer): the
parameter groups show it, as they hold only this rank's parameters.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.megatron.live.optimizer_adapters.undistributed import UndistributedAdapter


class LayerWiseAdapter(UndistributedAdapter):
    """Adapter for masters and moments of one optimizer in a LayerWiseDistributedOptimizer."""

    kind = "whole masters of whole parameters, each on one data-parallel rank"

    def __init__(self, optimizer: Any, layer_wise: Any) -> None:
        """Args: the Float16OptimizerWithFloat16Params, and its LayerWiseDistributedOptimizer.

        Raises:
            UnsupportedCheckpointError: weights are not rounded masters, or the masters are elsewhere.
        """
        super().__init__(optimizer)
        self._layer_wise = layer_wise
        if getattr(layer_wise, "use_fp8_param_sync", False):
            raise _not_filled("fp8 primary weights: no weight is the plain rounding of its master")
        if getattr(optimizer, "_optimizer_state_offloader", None) is not None:
            raise _not_filled("masters and momentum that are offloaded between the steps")

    @property
    @override
    def is_first_replica(self) -> bool:
        groups = self._layer_wise.pg_collection
        return groups is None or any(group.rank() == 0 for group in (groups.dp_cp, groups.expt_dp) if group is not None)

    @override
    def share_weights(self) -> None:
        """Share the parameters as after a step (`LayerWiseDistributedOptimizer.step`)."""
        if not getattr(self._layer_wise, "use_buffer_param_sync", False):
            self._layer_wise.allgather_params()
            return
        for chunk in self._layer_wise.model_chunks:
            chunk.start_param_sync(force_sync=True)


def _not_filled(unsupported: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        "this version does not support this kind of layer-wise optimizer from a checkpoint of another kind or layout",
        found=unsupported,
        hint="resume under the layout that the checkpoint was written with; or with --no-load-optim",
    )
