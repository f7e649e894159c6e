"""Conversions that are killed, or whose disk refuses: the old state or the new one, and nothing that looks whole."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import DestinationError
from mcore_ckpt_ext.storage.publish import Publication
from tests.conftest import fixture_named

KILLS = 10
KINDS = [("p09", "torch_dist"), ("p02", "legacy"), ("p09", "canonical")]


@pytest.mark.parametrize(("fixture", "to"), KINDS)
def test_killed_at_random_moments(fixture: str, to: str, tmp_path: Path) -> None:
    """A few of the fifty of `tests/slow`."""
    assert_survives_kills(KILLS, fixture, to, tmp_path)


def assert_survives_kills(kills: int, fixture: str, to: str, folder: Path) -> None:
    """Convert, kill and continue so many times: nothing half done passes for whole, and the bytes are the same."""
    program = Path(__file__).with_name("kill_conversions.py")
    command = [sys.executable, str(program), str(fixture_named(fixture).run), str(folder), to, str(kills)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout)
    assert report["killed"] == kills
    assert report["half published"] == report["partial passes"] == report["different"] == 0
    # The moments were inside of the work: most kills left something to continue.
    assert report["resumed"] > kills / 2
    # A process that died between the last rename and its own tidying leaves an empty folder at most.
    assert report["left behind"] <= report["published"]


def test_resuming_does_not_write_again_what_is_done(tmp_path: Path) -> None:
    """The journal counts, and what it counts is read back first."""
    source, steps = fixture_named("p02").run, []
    whole = mcore_ckpt_ext.convert(source, tmp_path / "whole", to="torch_dist").records

    def stop_halfway(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mcore_ckpt_ext.convert(source, tmp_path / "out", to="torch_dist", workers=1, progress=stop_halfway)
    (partial,) = tmp_path.glob("out*")
    assert partial.name.startswith("out.partial-")
    (journal,) = partial.glob("journal*")
    kept = len(journal.read_text().splitlines())
    mcore_ckpt_ext.convert(
        source, tmp_path / "out", to="torch_dist", resume=True, progress=lambda done, total: steps.append((done, total))
    )
    assert 0 < len(steps) == whole - kept < whole
    assert steps[-1][0] == steps[-1][1]
    for path in (tmp_path / "whole").rglob("*.distcp"):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "whole")).read_bytes()


def test_a_record_that_rotted_since_is_written_again(tmp_path: Path) -> None:
    source = fixture_named("p02").run

    def stop_late(done: int, total: int) -> None:
        if done > total * 0.9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mcore_ckpt_ext.convert(source, tmp_path / "out", to="torch_dist", workers=1, progress=stop_late)
    (file,) = tmp_path.rglob("__0_0.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    mcore_ckpt_ext.convert(source, tmp_path / "out", to="torch_dist", resume=True)
    mcore_ckpt_ext.convert(source, tmp_path / "whole", to="torch_dist")
    name = "iter_0000004/__0_0.distcp"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_two_at_once(tmp_path: Path) -> None:
    first, second = (Publication(tmp_path / "out", "0123456789abcdef") for _ in range(2))
    first.open()
    with pytest.raises(DestinationError, match="another process"):
        second.open()
    first.close()
    second.open()
    second.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("to", ["torch_dist", "legacy", "canonical"])
def test_a_full_disk(to: str, small_disk: Path) -> None:
    with pytest.raises(DestinationError, match="No space left.*--resume"):
        mcore_ckpt_ext.convert(fixture_named("p09").run, small_disk / "out", to=to)
    assert not (small_disk / "out").exists()


def test_a_disk_that_cannot_be_written(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(DestinationError, match="Read-only"):
        mcore_ckpt_ext.convert(fixture_named("p02").run, small_disk / "out", to="torch_dist")
    assert not list(small_disk.iterdir())
