"""Plugin for jobs of Megatron-FSDP and of torch's FSDP on CPU ranks.

Transformer Engine's FusedAdam has state for empty shards, too, because it creates the state of every parameter before
it checks the gradient (transformer_engine/pytorch/optimizers/fused_adam.py, 2.20.2). Otherwise ranks would disagree on
the parameters to save.
"""

import os
from typing import Any

import torch
from megatron_on_cpu.fused_adam import FusedAdam
from torch.distributed.device_mesh import DeviceMesh

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # 1, the value elsewhere, is refused
step = FusedAdam.step


def step_with_all_states(self: Any, closure: None = None, **options: Any) -> None:
    for group in self.param_groups:
        for parameter in group["params"]:
            if not self.state[parameter]:
                self.state[parameter] = {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
    step(self, closure, **options)


FusedAdam.step = step_with_all_states  # type: ignore[method-assign]

mesh_of = DeviceMesh.from_group


def mesh_on_cpu(group: Any, device_type: str, **options: Any) -> DeviceMesh:
    """Return a CPU mesh in place of the GPU mesh that Megatron requests (`TorchFullyShardedDataParallel`)."""
    return mesh_of(group, "cpu", **options)


DeviceMesh.from_group = staticmethod(mesh_on_cpu)  # type: ignore[method-assign, assignment]
