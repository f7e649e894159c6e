"""Test the output on a terminal: styles, progress, completion and lists of choices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.cli.output import BAD, GOOD, Painted, line, table
from mcore_ckpt_ext.cli.progress import Progress
from mcore_ckpt_ext.targets import TARGETS
from tests.harness.checkpoints import fixture_named
from tests.harness.terminal import on_terminal


def test_a_terminal_shows_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    assert main(["verify", str(fixture_named("p01").run), "--quick"]) == 0
    assert "\x1b[32mok\x1b[0m" in terminal.getvalue()
    assert "\x1b[32msound: metadata only, data not read\x1b[0m\n" in terminal.getvalue()


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_none_gets_none(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv(variable, value)
    line(Painted("bad", BAD))
    assert terminal.getvalue() == "bad\n"


def test_a_file_gets_none(capsys: pytest.CaptureFixture[str]) -> None:
    line(Painted("good", GOOD))
    assert capsys.readouterr().out == "good\n"


def test_columns_are_as_wide_as_the_visible_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    rows = [("a", Painted("ok", GOOD), 1), ("bcd", "failed", 20)]
    table(rows, right=[2])
    styled = terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    table(rows, right=[2])
    plain = terminal.getvalue()[len(styled) :]
    assert plain == "  a    ok       1\n  bcd  failed  20\n"
    assert styled.replace("\x1b[32m", "").replace("\x1b[0m", "") == plain


def test_a_narrow_table_breaks_no_word_but_a_very_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    terminal = on_terminal(monkeypatch)
    row = ("fully_reshardable", "one two three four five six seven", "/a/long/path" * 5)
    table([row])
    lines = terminal.getvalue().splitlines()
    assert lines[0].split()[0] == "fully_reshardable"
    assert row[2] not in terminal.getvalue()  # it is broken
    assert max(map(len, lines)) <= 60
    assert {"one", "two", "three", "four", "five", "six", "seven"} <= set(" ".join(lines).split())


def test_a_style_lets_no_control_character_through(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    line(Painted("\x1b[2Jname", BAD))
    assert terminal.getvalue() == "\x1b[1;31m\\x1b[2Jname\x1b[0m\n"


def test_progress_shows_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    now = [0.0]
    progress = Progress(clock=lambda: now[0])
    progress(0, 400 << 20)
    now[0] = 2.0
    progress(2 << 20, 400 << 20)
    assert "0 %  2.00 MiB of 400 MiB, 1.00 MiB/s, 6 min 38 s left" in terminal.getvalue()


@pytest.mark.parametrize("command", ["verify", "diff", "convert"])
def test_every_long_command_shows_it(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = on_terminal(monkeypatch)
    source = str(fixture_named("p08c").run)
    words = {"verify": [], "diff": [source], "convert": [str(tmp_path / "out"), "--to", "canonical"]}[command]
    assert main([command, source, *words]) == 0
    assert "\r100 %  " in terminal.getvalue()


def test_convert_without_a_target_explains_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(fixture_named("p01").run), str(tmp_path / "out")]) == 2
    output = capsys.readouterr().err
    assert all(f"--to {name}" in output for name in TARGETS)
    assert "that stock Megatron resumes under any layout" in output
    assert not list(tmp_path.iterdir())


def test_bash_completes_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["--print-completion", "bash"]) == 0
    (tmp_path / "completion.sh").write_text(capsys.readouterr().out)
    asked = (
        f"source {tmp_path / 'completion.sh'}; COMP_WORDS=(mcore-ckpt convert --memory); COMP_CWORD=2; "
        "$(complete -p mcore-ckpt | sed 's/.*-F \\([^ ]*\\).*/\\1/') mcore-ckpt --memory convert; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=20, check=False)
    assert done.stdout.split() == ["--memory-limit"], done.stderr


def test_completion_without_shtab_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err
