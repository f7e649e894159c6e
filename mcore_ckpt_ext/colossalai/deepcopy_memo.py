"""Replacements for what ``copy.deepcopy`` cannot copy: process groups, locks, computed tensors."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}
_LEAVES = (str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType, types.MethodType, type(None))


def memo_of_uncopied(module: nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy`: replacements for objects in a module that it cannot copy, by id.

    Process groups are shared. Locks are replaced by open ones. Generators continue from the same state. A tensor with a
    history, such as the weight of the older ``torch.nn.utils.weight_norm``, is replaced by a copy of its value; the
    module computes it again in the next forward pass.
    """
    return {id(held): stand_in for held in _everything_in(module) if (stand_in := _stand_in(held)) is not None}


def _stand_in(held: Any) -> Any:
    if isinstance(held, dist.ProcessGroup):
        return held
    if type(held) in _LOCKS:
        return _LOCKS[type(held)]()
    if isinstance(held, torch.Generator):
        return held.clone_state()
    if isinstance(held, torch.Tensor) and not held.is_leaf:
        return held.detach().clone()
    return None


def _everything_in(root: object) -> Iterator[Any]:
    """Yield every object that can be reached through attributes and containers, once."""
    seen: dict[int, object] = {}
    waiting = [root]
    while waiting:
        held = waiting.pop()
        if id(held) in seen or isinstance(held, _LEAVES):
            continue
        seen[id(held)] = held
        yield held
        if isinstance(held, Mapping):
            waiting += held.values()
        elif isinstance(held, (list, tuple, set, frozenset)):
            waiting += held
        elif not isinstance(held, torch.Tensor):
            waiting += vars(held).values() if hasattr(held, "__dict__") else ()
