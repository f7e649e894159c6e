"""Plugin: Megatron's helper for datasets cannot be compiled, as where Megatron was installed from PyPI.

Its packages lack the Makefile, and `compile_helpers` ends the process (megatron/core/datasets/utils.py, core_v0.17.0 to
0.19.2).
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any

utilities: Any = importlib.import_module("megatron.core.datasets.utils")
utilities.compile_helpers = partial(sys.exit, 1)
