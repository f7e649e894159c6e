"""Test `verify --prometheus` with Prometheus' own parser, for sound, damaged and unreadable checkpoints."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.cli.prometheus import Disk, metrics
from tests.harness.checkpoints import Fixture, fixture_named

# An exposition's line of a sample: https://prometheus.io/docs/instrumenting/exposition_formats/
SAMPLE = re.compile(
    r'^([a-z_]+)\{path="((?:[^"\\\n]|\\.)*)",depth="(?:quick|full)",file="run.prom"(?:,(\w+)="(\w+)")?\} (\S+)$'
)


def samples(path: Path, of: Path) -> dict[str, float]:
    """The values by name, with the value of a further label."""
    found: dict[str, float] = {}
    text = path.read_text()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP ") or (line.startswith("# TYPE ") and line.endswith(" gauge")):
            continue
        match = SAMPLE.match(line)
        assert match is not None, line
        assert match[2] == str(of)
        found[match[1].removeprefix("mcore_ckpt_") + (f" {match[4]}" if match[4] else "")] = float(match[5])
    return found


def test_a_sound_checkpoint(damaged: Fixture, tmp_path: Path) -> None:
    run, file = damaged.run, tmp_path / "metrics" / "run.prom"
    file.parent.mkdir()
    now = time.time()
    os.utime(damaged.iteration / "common.pt", (now - 100, now - 100))
    for _ in range(2):  # a former file is replaced
        assert main(["verify", str(run), "--quick", "--prometheus", str(file)]) == 0
    found = samples(file, run)
    assert (found["verify_exit_code"], found["verify_sound"], found["checkpoint_iteration"]) == (0, 1, 4)
    assert (found["verify_checks failed"], found["verify_problems error"], found["verify_problems warning"]) == (
        0,
        0,
        0,
    )
    assert found["verify_checks passed"] > 2
    files = [path.stat() for path in damaged.iteration.rglob("*") if path.is_file()]
    assert found["checkpoint_bytes"] == sum(status.st_size for status in files)
    assert found["checkpoint_timestamp_seconds"] == max(status.st_mtime for status in files) == pytest.approx(now - 100)
    assert 100 <= found["checkpoint_age_seconds"] < 700
    assert 0 < found["verify_duration_seconds"] < 600
    assert [path.name for path in file.parent.iterdir()] == ["run.prom"]


def test_a_damaged_checkpoint(damaged: Fixture, tmp_path: Path) -> None:
    os.truncate(damaged.iteration / "__3_0.distcp", 10)
    assert main(["verify", str(damaged.run), "--quick", "--prometheus", str(tmp_path / "run.prom")]) == 1
    found = samples(tmp_path / "run.prom", damaged.run)
    assert (found["verify_exit_code"], found["verify_sound"], found["verify_checks failed"]) == (1, 0, 1)
    assert found["verify_problems error"] >= 1


def test_one_that_cannot_be_read(tmp_path: Path) -> None:
    assert main(["verify", str(tmp_path / "nothing"), "--prometheus", str(tmp_path / "run.prom")]) == 2
    found = samples(tmp_path / "run.prom", tmp_path / "nothing")
    assert found.keys() == {"verify_exit_code", "verify_timestamp_seconds", "verify_duration_seconds"}
    assert found["verify_exit_code"] == 2


def test_nothing_else_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("precious")
    run = str(fixture_named("p01").run)
    assert main(["verify", run, "--prometheus", str(tmp_path / "precious")]) == 2
    assert "would overwrite" in capsys.readouterr().err
    assert main(["verify", run, "--prometheus", str(tmp_path / "nowhere" / "run.prom")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_store_without_times() -> None:
    text = metrics("memory://run", 0, 1.0, None, Disk(5, None), file="a.prom")
    assert 'mcore_ckpt_checkpoint_bytes{path="memory://run",depth="full",file="a.prom"} 5.0' in text
    assert "age" not in text


def test_labels_are_escaped() -> None:
    lines = metrics('/a"b\\c\nd', 0, 1.0, file='a".prom').splitlines()
    assert lines[2] == r'mcore_ckpt_verify_exit_code{path="/a\"b\\c\nd",depth="full",file="a\".prom"} 0.0'


def test_two_files_of_metrics_have_no_series_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two folders, of a quick and a full verification, and of two nightly jobs that verify the same folder."""
    found = set()
    for folder in (Path.cwd(), "/"):
        monkeypatch.chdir(folder)
        for quick in (False, True):
            for file in ("a.prom", "b.prom"):
                found.add(metrics("run", 0, 1.0, quick=quick, file=file).splitlines()[2])
    assert len(found) == 8
