"""Tests of what only some releases of torch do; cells of the test matrix have others than the test command."""

from __future__ import annotations

import pytest
import torch

from mcore_ckpt_ext.job.releases import TORCH_LOADS_PLUGINS
from mcore_ckpt_ext.versions import parse_version

LOADS_PLUGINS = TORCH_LOADS_PLUGINS.is_of(parse_version(torch.__version__) or (0, 0))
with_plugins = pytest.mark.skipif(
    not LOADS_PLUGINS,
    reason=f"torch loads plugins since {TORCH_LOADS_PLUGINS.since}: python3 scripts/run_tests.py tests/patching",
)
