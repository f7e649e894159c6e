"""Test ZeroDDP of ColossalAI 0.2.x and 0.3.x, in the checkouts of COLOSSALAI_PATH (separated by a colon)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLE = "COLOSSALAI_PATH"
CHECKOUTS = [Path(path) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]


@pytest.mark.skipif(
    not CHECKOUTS,
    reason=f"runs ColossalAI 0.2 and 0.3 in checkouts of v0.2.0 and v0.3.0: {VARIABLE}=FOLDER:FOLDER "
    "python3 scripts/run_tests.py tests/colossalai",
)
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=str)
def test_zero_ddp(checkout: Path) -> None:
    job = Path(__file__).with_name("old_version_job.py")
    done = subprocess.run(
        [sys.executable, str(job), str(checkout)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    if (checkout / "version.txt").read_text().startswith("0.2.0"):
        # The defect that began it all: hpcaitech/ColossalAI issue 2361.
        assert "lm_head.weight" in done.stdout
