"""Plugin: parameter groups lose the setting that TEST_REMOVED_SETTING names before each save, as with ms-swift 4.1."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

VARIABLE = "TEST_REMOVED_SETTING"


def install() -> None:
    """Wrap the function that makes the state to save."""
    original = DistributedOptimizer.sharded_state_dict
    signature = inspect.signature(original)

    @functools.wraps(original)
    def sharded_state_dict(self: Any, *positional: Any, **keywords: Any) -> Any:
        if not signature.bind(self, *positional, **keywords).arguments.get("is_loading"):
            for group in self.optimizer.param_groups:
                group.pop(os.environ.get(VARIABLE), None)
        return original(self, *positional, **keywords)

    DistributedOptimizer.sharded_state_dict = sharded_state_dict


install()
