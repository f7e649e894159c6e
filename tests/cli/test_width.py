"""Test the output on terminals of 80 and 200 columns, where long lists are folded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext.cli import inspect as inspect_command
from mcore_ckpt_ext.cli import output
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.cli.output import table
from mcore_ckpt_ext.cli.terminal import fit_widths
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.inspection_result import Inspection, StoredFile
from tests.harness.checkpoints import fixture_named

FILES = 1024


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "p01"],
        ["inspect", "p01", "--all"],
        ["inspect", "p08"],
        ["verify", "p01"],
        ["diff", "p01", "p10"],
        ["plan", "p22", "--gpus", "8"],
        ["doctor", "--all"],
    ],
    ids=lambda words: " ".join(words),
)
def test_tables_fit_the_terminal(
    columns: int, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No row of a table is wider; each column that is broken goes on below itself."""
    monkeypatch.setenv("COLUMNS", str(columns))
    words = [str(fixture_named(word).run) if word.startswith("p") and word[1].isdigit() else word for word in command]
    written: list[str] = []
    monkeypatch.setattr("mcore_ckpt_ext.cli.output._columns", _watched(written))
    main(words)
    out = capsys.readouterr().out
    assert written
    assert max(map(len, written)) <= columns
    assert all(row in out for row in written)


def _watched(written: list[str]) -> Callable[..., list[Any]]:
    original: Callable[..., list[Any]] = output._columns

    def columns(*arguments: Any) -> list[Any]:
        parts = original(*arguments)
        written.append("".join(map(str, parts)))
        return parts

    return columns


def test_without_a_terminal_no_row_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table([("a", "word " * 100)])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_widest_columns_are_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table([("name", "one two three four five six", 7), ("other", "a", 12)], right=[2])
    assert capsys.readouterr().out.splitlines() == [
        "  name   one two three four five six   7",
        "  other  a                            12",
    ]
    monkeypatch.setenv("COLUMNS", "32")
    table([("name", "one two three four five six", 7), ("other", "a", 12)], right=[2])
    assert capsys.readouterr().out.splitlines() == [
        "  name   one two three four    7",
        "         five six",
        "  other  a                    12",
    ]


@pytest.mark.parametrize("available", range(30, 130, 7))
def test_widths_that_fit(available: int) -> None:
    for widths in ([8, 90, 30], [50, 50, 50], [10, 10], [100]):
        found = fit_widths([["abc " * (width // 4) + "x" * (width % 4)] for width in widths], available)
        assert sum(found) <= max(available, 16 * len(widths))
        assert all(new == old or new >= 16 for new, old in zip(found, widths, strict=True))


def with_many_files(found: Inspection) -> Inspection:
    files = [StoredFile(f"__{rank}_0.distcp", rank, 0, f"data {rank}", (1 + rank) << 20, 3) for rank in range(FILES)]
    files[7].bytes_on_disk = None
    object.__setattr__(found, "files", (*files, StoredFile("common.pt", None, None, "", 1 << 10)))
    return found


@pytest.mark.parametrize("show_all", [False, True])
def test_a_thousand_files_are_one_line(
    show_all: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    found = with_many_files(inspect(fixture_named("p01").run))
    monkeypatch.setattr("mcore_ckpt_ext.operations.inspection.inspect", lambda *_, **__: found)
    assert main(["inspect", "run", *(["--all"] if show_all else [])]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if ".distcp" in line and "x_y" not in line]
    if show_all:
        assert len(rows) == FILES
        return
    assert [" ".join(row) for row in rows] == [
        "__0_0.distcp to __1023_0.distcp 1,023 files from ranks 0 to 1023 1.00 MiB to 1.00 GiB "
        "3,069 records, 512 GiB in all",
        "__7_0.distcp rank 7, writer 0 (data 7) MISSING 3 records of 0 tensors",
    ]
    assert "--all lists every file" in out
    assert inspect_command._FILES_SHOWN == 32


@pytest.mark.parametrize("show_all", [False, True])
def test_findings_of_one_kind_are_joined_with_a_count(
    show_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    shutil.copytree(fixture_named("p01").run, tmp_path / "run")
    for file in (tmp_path / "run" / "iter_0000004").glob("__*.distcp"):
        file.unlink()
    assert main(["verify", str(tmp_path / "run"), "--quick", *(["--all"] if show_all else [])]) == 1
    out = capsys.readouterr().out
    assert out.count("missing; it held") == (16 if show_all else 4)
    assert ("  and 12 more like the last; --all lists them" in out) == (not show_all)
