"""Plugin: if TEST_BY_FUNCTION is set, Megatron 0.19 builds the model by a function, as for most scripts.

Only then does `--optimizer muon --use-distributed-optimizer` have a separate DistributedOptimizer for Adam: if the
model is built by its configuration, Megatron does not lay out the buffers for it (`setup_model_and_optimizer` and
`get_model`, megatron/training/training.py, 0.19.1, 0.19.2).
"""

from __future__ import annotations

import functools
import os
from typing import Any

from megatron.training import training


def install() -> None:
    """Wrap the setup, which supports both."""
    original = training.setup_model_and_optimizer

    @functools.wraps(original)
    def setup(*positional: Any, **keywords: Any) -> Any:
        if "TEST_BY_FUNCTION" not in os.environ:
            return original(*positional, **keywords)
        return by_function(*positional, **keywords)

    def by_function(model_type: Any, *, cfg_container: Any, **keywords: Any) -> Any:
        configuration = cfg_container.model

        def provide(config: Any = None, **stage: Any) -> Any:
            return configuration.get_builder_cls()(configuration).build_model(**stage)

        return original(model_type, **{**keywords, "model_provider_func": provide})

    training.setup_model_and_optimizer = setup


install()
