"""Plugin of `proof.py`: measures a load and the master check at its end on each rank, without waiting for others."""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

measured = {"load": 0.0, "proof": 0.0, "load processor": 0.0, "proof processor": 0.0}


def timed(work: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function with a sum of its elapsed time and its processor time."""

    @functools.wraps(work)
    def run(*positional: Any, **keywords: Any) -> Any:
        begun, busy = time.perf_counter(), time.process_time()
        try:
            return work(*positional, **keywords)
        finally:
            measured[name] += time.perf_counter() - begun
            measured[f"{name} processor"] += time.process_time() - busy
            report = Path(os.environ["PROOF_REPORT"]) / f"{os.environ['RANK']}.json"
            report.write_text(json.dumps(measured))

    return run


training: Any = importlib.import_module("megatron.training.training")
proof: Any = importlib.import_module("mcore_ckpt_ext.megatron.check_after_load")
proof.live_mismatches = timed(proof.live_mismatches, "proof")
training.load_checkpoint = timed(training.load_checkpoint, "load")
