"""Runs a training script of ColossalAI on CPU ranks: `torchrun --nproc-per-node 2 -m colossalai_on_cpu train.py`."""

from __future__ import annotations

import runpy
import sys

from colossalai_on_cpu import redirect

redirect.install()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
