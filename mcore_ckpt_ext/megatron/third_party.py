"""Bypasses other training loops' checks that refuse a changed layout before Megatron Core is called.

`core_load` then lets Megatron Core load what it supports, plans and verifies the rest, and refuses on all ranks if an
optimizer cannot be filled. So a check is bypassed only for optimizers that `core_load` supports.
- Megatron-Bridge, `_load_checkpoint_from_path` (megatron/bridge/training/checkpointing.py, 0.2.1 to 0.6.0 and the
  development head of 22 August 2026): checks that the stored format is among those of
  `DistributedOptimizer.checkpoint_fully_reshardable_formats`. NeMo-RL uses it.
- ms-swift, `load_mcore_checkpoint` (swift/megatron/utils/megatron_lm_utils.py, 4.6.0 and the development head of 22
  August 2026): checks the same by its own list, if `args.use_distributed_optimizer` is set; it uses this argument
  for nothing else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Container
from typing import Any

from mcore_ckpt_ext.megatron.core_facts import serves
from mcore_ckpt_ext.patching.overrides import overridden, scope_of
from mcore_ckpt_ext.patching.patch_point import Function


class _Everything(Container[object]):
    """Report every format as loadable under any layout, since `core_load` decides."""

    def __contains__(self, item: object) -> bool:
        return True


class _AnyFormat:
    """A replacement for `DistributedOptimizer` in a function that only uses its list of formats."""

    checkpoint_fully_reshardable_formats = _Everything()


def wrap_bridge_load(original: Function) -> Function:
    """Wrap Megatron-Bridge's `_load_checkpoint_from_path`."""
    scope = scope_of(original)
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
    """Wrap ms-swift's `load_mcore_checkpoint`."""
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
