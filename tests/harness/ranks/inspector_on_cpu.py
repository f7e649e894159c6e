"""Plugin for Megatron's `tools/checkpoint/checkpoint_inspector.py`: its process group and its mesh use CPU ranks."""

from typing import Any

import torch
from torch.distributed import device_mesh

start, mesh = torch.distributed.init_process_group, device_mesh.DeviceMesh.__init__


def start_with_gloo(*_: object, **__: object) -> None:
    start("gloo")


def mesh_of_processors(self: Any, device_type: str, *positional: Any, **keywords: Any) -> None:
    mesh(self, "cpu", *positional, **keywords)


torch.distributed.init_process_group = start_with_gloo
device_mesh.DeviceMesh.__init__ = mesh_of_processors  # type: ignore[method-assign]
torch.cuda.mem_get_info = lambda *_: (1, 1)
