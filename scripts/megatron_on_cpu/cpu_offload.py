"""``--optimizer-cpu-offload`` on CPU ranks: a plugin of ``launch.run``.

Megatron's HybridDeviceOptimizer runs unchanged. It uses ``is_cuda`` of tensors to distribute its parameters between the
devices. Here ``is_cuda`` has the value of a machine with a GPU: False for tensors that were fetched with ``.cpu()`` or
derived from them, and True for all others.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class _TwoDevices(TorchFunctionMode):
    """Records which tensors would be on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._fetched: Any = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _IS_CUDA:
            return args[0] not in self._fetched
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (func is torch.Tensor.cpu or (args and args[0] in self._fetched)):
            self._fetched[result] = True
        return result


def install() -> None:
    """Distribute parameters as with a GPU; 0.16.1 also needs the version of Transformer Engine."""
    hybrid: Any = importlib.import_module("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
    config: Any = importlib.import_module("megatron.core.optimizer.optimizer_config")
    original = hybrid.HybridDeviceOptimizer._get_sub_optimizer_param_groups

    @functools.wraps(original)
    def share_out(*args: Any, **kwargs: Any) -> Any:
        with _TwoDevices():
            return original(*args, **kwargs)

    hybrid.HybridDeviceOptimizer._get_sub_optimizer_param_groups = share_out
    config.is_te_min_version = lambda *_, **__: True


if __name__ == "<run_path>":  # as a plugin
    install()
