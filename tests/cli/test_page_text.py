"""Test what the pages of `--html` say without a browser: title, date, version, data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.unknown_keys import add_to_torch_dist

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


@pytest.mark.parametrize("command", ["verify", "diff"])
def test_a_page_has_the_verdict_of_the_terminal(
    command: str, damaged: Fixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key that nobody knows is part of the verdict."""
    add_to_torch_dist(damaged.iteration)
    page = tmp_path / "page.html"
    main([command, *[str(damaged.run)] * (2 if command == "diff" else 1), "--html", str(page)])
    verdict = json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])["verdict"]
    assert verdict == capsys.readouterr().out.splitlines()[-1]
    assert "not looked at: " in verdict or "keys were not compared" in verdict


def test_verify_does_not_overwrite_what_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    assert main(["verify", str(RUN), "--quick", "--html", str(tmp_path / "notes.txt")]) == 2
    assert "overwrite" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "notes"


SHOWN: dict[str, tuple[list[str], Callable[[Any], list[Any]]]] = {
    "layouts": (["--gpus", "6"], lambda said: [*said["sentences"], *said["best"], *said["rows"]]),
    "fewer GPUs": (["--gpus", "7"], lambda said: [*said["remarks"], *said["fewer"]]),
    "a rehearsal": (["--gpus", "4", "--rehearse", "tp=2", "pp=2"], lambda said: [*said["remarks"], *said["checked"]]),
}


@pytest.mark.parametrize("case", SHOWN)
def test_the_page_of_a_plan_says_what_a_terminal_shows(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, parts = SHOWN[case]
    path, run = tmp_path / "page.html", str(fixture_named("p02").run)
    assert main(["plan", run, *words, "--argument", "train_iters=99", "--html", str(path)]) == 0
    said = json.loads(path.read_text().partition('id="data">')[2].partition("</script>")[0])["shown"]
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    named = parts(said)
    assert any("train_iters is 99, as passed; the checkpoint stores" in remark for remark in said["remarks"])
    assert any("same training, but for rounding" in str(part) for part in named) == (case != "fewer GPUs")
    assert len(named) > 2
    for part in named:
        assert (part if isinstance(part, str) else " ".join(part)) in lines
