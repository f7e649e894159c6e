"""Test ranks that succeed, fail, hang or die: they are real processes, and none remains."""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from mcore_ckpt_ext.selftest.launcher import Ended, all_on_this_node, log_of, start


def run(folder: Path, program: str, *, ranks: int = 2, patience: float = 30, gets_on: bool = False) -> Ended:
    """Each rank writes the process of a child that would outlive it, and runs a program."""
    whole = (
        "import os, subprocess, sys, time\n"
        "rank, folder = int(os.environ['RANK']), os.path.dirname(sys.argv[1])\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(os.path.join(folder, f'child{rank}'), 'w').write(str(child.pid))\n" + program
    )
    steps = count()
    return start(
        all_on_this_node(ranks),
        folder / "order.json",
        progress=(lambda: next(steps)) if gets_on else (lambda: 0),
        patience=patience,
        program=(sys.executable, "-c", whole),
    )


def is_running(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> object:
    yield
    children = [int(path.read_text()) for path in tmp_path.glob("child*")]
    until = time.monotonic() + 10
    while any(map(is_running, children)) and time.monotonic() < until:
        os.sched_yield()
    assert children
    assert not any(map(is_running, children))


def test_all_end_well(tmp_path: Path) -> None:
    program = "print('here is', rank, os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])"
    assert run(tmp_path, program) == Ended(True)
    assert log_of(tmp_path, 1).read_text() == "here is 1 2 1\n"


def test_one_fails_and_the_other_waits_for_it(tmp_path: Path) -> None:
    ended = run(tmp_path, "sys.exit(3) if rank else time.sleep(600)")
    assert (ended.succeeded, str(ended)) == (False, "rank 1 ended with exit code 3")


def test_one_dies(tmp_path: Path) -> None:
    found = run(tmp_path, "os.kill(os.getpid(), 9) if rank else time.sleep(600)")
    assert (found.succeeded, str(found)) == (False, "rank 1 ended with signal SIGKILL")


def test_all_hang(tmp_path: Path) -> None:
    assert run(tmp_path, "time.sleep(600)", patience=2) == Ended(False, "no progress in 2 s")


def test_patience_is_for_each_job(tmp_path: Path) -> None:
    assert run(tmp_path, "time.sleep(3)", patience=1, gets_on=True) == Ended(True)
