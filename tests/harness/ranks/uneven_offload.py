"""Plugin: if TEST_UNEVEN is set, rank 1 offloads less of its optimizer to the CPU than the others do."""

from __future__ import annotations

import importlib
import os
from typing import Any

if os.environ["RANK"] == "1":
    config: Any = importlib.import_module("megatron.core.optimizer.optimizer_config").OptimizerConfig
    original = config.__post_init__

    def post_init(self: Any) -> None:
        if "TEST_UNEVEN" in os.environ:
            self.optimizer_offload_fraction = 0.25
        original(self)

    config.__post_init__ = post_init
