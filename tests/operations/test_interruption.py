"""Test conversions that are killed, or whose disk fails: the old or the new state remains, never a mixture."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext import Legacy
from mcore_ckpt_ext.errors import DestinationError, UnreadableCheckpointError
from mcore_ckpt_ext.targets import TARGETS
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import MATRIX, flip, payload_position
from tests.harness.kills import KINDS, assert_survives_kills

KILLS = 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fixture", "to"), [KINDS[0], *(pytest.param(*kind, marks=pytest.mark.nightly) for kind in KINDS[1:])]
)
def test_killed_at_random_moments(fixture: str, to: str, tmp_path: Path) -> None:
    """A few of the fifty of `tests/slow`."""
    assert_survives_kills(KILLS, fixture, to, tmp_path)


def test_resuming_does_not_write_again_what_is_done(tmp_path: Path) -> None:
    """The journal counts, and what it counts is read back first."""
    source, steps = fixture_named("p02").run, []
    whole = mcore_ckpt_ext.convert(source, tmp_path / "whole", mcore_ckpt_ext.TorchDist()).records

    def stop_halfway(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mcore_ckpt_ext.convert(source, tmp_path / "out", mcore_ckpt_ext.TorchDist(), workers=1, progress=stop_halfway)
    (partial,) = tmp_path.glob("out*")
    assert partial.name.startswith("out.partial-")
    (journal,) = partial.glob("journal*")
    kept = len(journal.read_text().splitlines())
    mcore_ckpt_ext.convert(
        source,
        tmp_path / "out",
        mcore_ckpt_ext.TorchDist(),
        resume=True,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert 0 < len(steps) == whole - kept < whole
    assert steps[-1][0] == steps[-1][1]
    for path in (tmp_path / "whole").rglob("*.distcp"):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "whole")).read_bytes()


def test_an_interrupt_stops_all_threads(tmp_path: Path) -> None:
    """Python raises it in the main thread, which waits for the others."""
    # A shell has those ignore it that it starts in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    steps: list[int] = []

    def interrupt(done: int, total: int) -> None:
        if not steps:
            os.kill(os.getpid(), signal.SIGINT)
        steps.append(done)
        time.sleep(0.5)  # time for the main thread of a busy machine

    try:
        with pytest.raises(KeyboardInterrupt):
            mcore_ckpt_ext.convert(
                fixture_named("p02").run, tmp_path / "out", mcore_ckpt_ext.TorchDist(), workers=2, progress=interrupt
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(steps) <= 6  # of more than a hundred
    assert not (tmp_path / "out").exists()


def test_a_record_that_rotted_since_is_written_again(tmp_path: Path) -> None:
    source = fixture_named("p02").run

    def stop_late(done: int, total: int) -> None:
        if done > total * 0.9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mcore_ckpt_ext.convert(source, tmp_path / "out", mcore_ckpt_ext.TorchDist(), workers=1, progress=stop_late)
    (file,) = tmp_path.rglob("__0_0.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    mcore_ckpt_ext.convert(source, tmp_path / "out", mcore_ckpt_ext.TorchDist(), resume=True)
    mcore_ckpt_ext.convert(source, tmp_path / "whole", mcore_ckpt_ext.TorchDist())
    name = "iter_0000004/__0_0.distcp"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_resuming_compares_the_checksums_of_what_was_read_before(tmp_path: Path) -> None:
    """Of a source that was damaged all along: the interrupted run may have read half of a record."""
    source = fixture_named("p02").copy_to(tmp_path / "source")

    def stop_late(done: int, total: int) -> None:
        if done > total * 0.9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mcore_ckpt_ext.convert(source.run, tmp_path / "out", Legacy(), workers=1, progress=stop_late)
    file, position = payload_position(mcore_ckpt_ext.open_checkpoint(source.run), "exp_avg", MATRIX, 17)
    before = file.stat()
    file.chmod(0o644)
    flip(file, position)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UnreadableCheckpointError, match="is damaged: its checksum differs"):
        mcore_ckpt_ext.convert(source.run, tmp_path / "out", Legacy(), resume=True)


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
        mcore_ckpt_ext.convert(fixture_named("p09").run, small_disk / "out", TARGETS[to]())
    assert not (small_disk / "out").exists()


def test_a_disk_that_cannot_be_written(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(DestinationError, match="Read-only"):
        mcore_ckpt_ext.convert(fixture_named("p02").run, small_disk / "out", mcore_ckpt_ext.TorchDist())
    assert not list(small_disk.iterdir())
