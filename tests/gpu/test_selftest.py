"""The self-test, as a user runs it: genuine Megatron, Transformer Engine and NCCL, on all GPUs, and on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext.cli.json_schema import schema_of
from tests.harness.json_schema import violations

TIME_LIMIT = 400


def selftest(folder: Path, *words: str) -> dict[str, Any]:
    report = folder / "report.json"
    command = [sys.executable, "-m", "mcore_ckpt_ext", "selftest", "--folder", str(folder), "--json", str(report)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert violations(found, schema_of("selftest")) == []
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("words", [(), ("--nproc", "1")])
def test_all_jobs_pass(words: tuple[str, ...], tmp_path: Path) -> None:
    found = selftest(tmp_path, *words)
    assert found["passed"]
    skipped = [(row["model"], row["details"]) for row in found["rows"] if row["outcome"] == "skipped"]
    print("skipped:", skipped)
    assert {path.name for path in tmp_path.iterdir()} == {"report.json"}
