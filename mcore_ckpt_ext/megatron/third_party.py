"""Bypasses the layout checks of loops that refuse another layout before they call Megatron Core; changes nothing else.

`core_load` then loads with Megatron Core what that supports, plans and verifies the rest, and refuses on all ranks what
cannot be filled. So a check is bypassed only for optimizers that `core_load` supports.

- Megatron-Bridge, `_load_checkpoint_from_path` (megatron/bridge/training/checkpointing.py, 0.2.1 to 0.6.0 and the
  development head of 22 August 2026): asks whether the stored format is among those that
  `DistributedOptimizer.checkpoint_fully_reshardable_formats` names. NeMo-RL runs on it.
- ms-swift, `load_mcore_checkpoint` (swift/megatron/utils/megatron_lm_utils.py, 4.6.0 and the development head of 22
  August 2026): asks the same of a list of its own, where `args.use_distributed_optimizer` is set, which it looks at for
  nothing else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, MutableMapping
from typing import Any

from mcore_ckpt_ext.megatron.core_load import serves
from mcore_ckpt_ext.patching.overrides import overridden

Function = Callable[..., Any]


class _Everything(Container[object]):
    """Report every format as loadable under any layout, since the loader decides."""

    def __contains__(self, item: object) -> bool:
        return True


class _AnyFormat:
    """In place of `DistributedOptimizer`, where nothing but its list of formats is looked at."""

    checkpoint_fully_reshardable_formats = _Everything()


def wrap_bridge_load(original: Function) -> Function:
    """Around Megatron-Bridge's `_load_checkpoint_from_path`."""
    scope: MutableMapping[str, Any] = inspect.unwrap(original).__globals__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint_from_path(*positional: Any, **keywords: Any) -> Any:
        optimizer = signature.bind(*positional, **keywords).arguments["optimizer"]
        if not serves(optimizer):
            return original(*positional, **keywords)
        with overridden(scope, DistributedOptimizer=_AnyFormat):
            return original(*positional, **keywords)

    return load_checkpoint_from_path


def wrap_swift_load(original: Function) -> Function:
    """Around ms-swift's `load_mcore_checkpoint`."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_mcore_checkpoint(*positional: Any, **keywords: Any) -> Any:
        call = signature.bind(*positional, **keywords)
        call.apply_defaults()
        if not serves(call.arguments["optimizer"]):
            return original(*positional, **keywords)
        with overridden(vars(call.arguments["args"]), use_distributed_optimizer=False):
            return original(*positional, **keywords)

    return load_mcore_checkpoint
