"""Process groups on the test device, which like NCCL's accept only device memory; gloo transports the bytes."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils._pytree import tree_flatten

from tests.harness.device import DeviceMemoryError, DeviceTensor
from tests.harness.replacing import replaced

BACKENDS_VARIABLE = "TEST_BACKENDS"
"""Environment variable: the group's backends, such as `cpu:gloo,cuda:nccl`; by default only NCCL."""
_COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "gather", "all_gather_into_tensor", "reduce", "send", "recv")
_PRODUCT = "mcore_ckpt_ext"


def _backends(group: Any = None) -> str:
    return os.environ.get(BACKENDS_VARIABLE, "cuda:nccl")


def _check(*operands: Any) -> None:
    """Refuse CPU tensors in a group without a backend for them."""
    tensors = [item for item in tree_flatten(operands)[0] if hasattr(item, "device")]
    if "cpu" not in _backends() and not all(isinstance(item, DeviceTensor) for item in tensors):
        raise DeviceMemoryError("no backend type associated with device type cpu")


class _Operation(dist.P2POp):
    def __new__(cls, op: Any, tensor: Any, *positional: Any, **keywords: Any) -> Any:
        _check(tensor)
        return super().__new__(cls, op, tensor, *positional, **keywords)


def _checked(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Check the operands in calls from this package, but not in those from Megatron and torch."""

    @functools.wraps(collective)
    def call(*positional: Any, **keywords: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith(_PRODUCT):
            _check(positional, keywords)
        return collective(*positional, **keywords)

    return call


@contextlib.contextmanager
def device_groups() -> Iterator[None]:
    """Within this scope, this package sees the process groups of a job with NCCL."""
    collectives = {name: _checked(getattr(dist, name)) for name in _COLLECTIVES}
    with replaced(dist, get_backend_config=_backends, P2POp=_Operation, **collectives):
        yield
