"""Test what the pages of `--html` say without a browser: title, date, version, data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from tests.harness.checkpoints import fixture_named

RUN = fixture_named("p01").run
COMMANDS: dict[str, list[object]] = {
    "inspect": [RUN],
    "verify": [RUN, "--quick"],
    "plan": [RUN, "--gpus", 8],
    "diff": [RUN, fixture_named("p08b").run],
}


def page_of(command: str, folder: Path) -> tuple[str, dict[str, Any]]:
    path = folder / "page.html"
    assert main([command, *map(str, COMMANDS[command]), "--html", str(path)]) == 0
    text = path.read_text()
    title = re.search("<title>(.*)</title>", text)
    data = re.search('<script type="application/json" id="data">(.*)</script>', text)
    assert title and data
    return title[1], json.loads(data[1])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_names_run_command_version_and_date(command: str, tmp_path: Path) -> None:
    title, data = page_of(command, tmp_path)
    assert "/iter_0000004" in title or RUN.name in title
    assert title.endswith(f" - mcore-ckpt {command}")
    assert len(data["page"]["runs"]) == (2 if command == "diff" else 1)
    made = rf"mcore-ckpt {command} {re.escape(mcore_ckpt_ext.__version__)}, \d{{4}}-\d\d-\d\d \d\d:\d\d UTC"
    assert re.fullmatch(made, data["page"]["made"])


def test_the_page_of_verify_has_all_checks_and_findings(tmp_path: Path) -> None:
    _, data = page_of("verify", tmp_path)
    assert data["sound"] and data["quick"]
    assert {one["status"] for one in data["checks"]} <= {"passed", "skipped", "not applicable"}


def test_verify_does_not_overwrite_what_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    assert main(["verify", str(RUN), "--quick", "--html", str(tmp_path / "notes.txt")]) == 2
    assert "overwrite" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "notes"
