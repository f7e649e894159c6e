"""Test the tutorial's script with the genuine ColossalAI on CPU ranks: it trains, and resumes on other ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "colossalai.md"
TIME_LIMIT = 240


def loss_of(folder: Path, ranks: int, word: str) -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", port]
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    result = subprocess.run(
        [sys.executable, *launcher, "-m", "colossalai_on_cpu", "train.py"],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=TIME_LIMIT,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-6000:]
    found = re.search(rf"{word}: loss (\d+\.\d+)", result.stdout)
    assert found is not None, result.stdout[-2000:]
    return float(found[1])


@pytest.mark.nightly
def test_the_script_trains_and_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    script = PAGE.read_text().partition('```python title="train.py: needs ColossalAI"\n')[2].partition("```")[0]
    (tmp_path / "train.py").write_text(script)
    trained = loss_of(tmp_path, 2, "trained")
    assert loss_of(tmp_path, 1, "resumed") < trained
