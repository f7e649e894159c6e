"""Measure whole loads of genuine jobs, as `benchmarks/loading.py --device` prints them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mcore_ckpt_ext.devices import accelerator_type

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "loading.py"
# Each load is a job of its own, which starts longer than it loads.
SIZE = ("--layers", "8", "--hidden", "1024", "--runs", "1")
TIME_LIMIT = 300


def test_loads_are_measured(tmp_path: Path, at_most: Callable[[float], float], figure: Callable[[str], None]) -> None:
    """Stock's and this package's under the layout that was saved, and this package's of what CPU ranks saved."""
    command = [sys.executable, str(BENCHMARK), str(tmp_path), "--device", str(accelerator_type()), *SIZE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=at_most(TIME_LIMIT), check=False)
    figure(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split()[1] for line in done.stdout.splitlines() if line.startswith("| ")} >= {"stock", "fast", "moved"}
