"""Conversions that are killed at random moments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.harness.checkpoints import fixture_named

KINDS = [("p09", "torch_dist"), ("p02", "legacy"), ("p09", "canonical")]


def assert_survives_kills(kills: int, fixture: str, to: str, folder: Path) -> None:
    """Convert, kill and continue several times: no partial result is accepted as complete, and the bytes are equal."""
    program = Path(__file__).with_name("kill_conversions.py")
    command = [sys.executable, str(program), str(fixture_named(fixture).run), str(folder), to, str(kills)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout)
    assert report["killed"] == kills
    assert report["half published"] == report["partial passes"] == report["different"] == 0
    # The moments were within the work: most kills left something to continue.
    assert report["resumed"] > kills / 2
    # A process that was killed between the last rename and its cleanup leaves at most an empty folder.
    assert report["left behind"] <= report["published"]
