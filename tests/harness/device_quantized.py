"""Transformer Engine's quantized tensors on the test device: their parts, bytes and scales, are tensors on it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from tests.harness.device import Factories, without_gradients
from tests.harness.replacing import replaced

_MODULE = "transformer_engine.pytorch.quantized_tensor"


@contextlib.contextmanager
def quantized_on_device() -> Iterator[None]:
    """Within this scope, what the tensors' class creates during an operation is on the device, too."""
    if _MODULE not in sys.modules:
        yield
        return
    kind = sys.modules[_MODULE].QuantizedTensor
    expand_as = kind.expand_as
    with contextlib.ExitStack() as stack:
        for one in (kind, *kind.__subclasses__()):
            if "__torch_dispatch__" in vars(one):
                stack.enter_context(replaced(one, __torch_dispatch__=classmethod(_on_device(one))))
        stack.enter_context(replaced(kind, expand_as=_without_gradients(expand_as)))
        yield


def _on_device(kind: Any) -> Any:
    dispatch = vars(kind)["__torch_dispatch__"].__func__

    def torch_dispatch(cls: type, *positional: Any, **keywords: Any) -> Any:
        with torch._C._EnableTorchFunction(), Factories():
            return dispatch(cls, *positional, **keywords)

    return torch_dispatch


def _without_gradients(expand_as: Any) -> Any:
    return lambda tensor, other: without_gradients(tensor) if other is tensor else expand_as(tensor, other)
