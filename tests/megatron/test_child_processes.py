"""Test that Megatron's background processes end with the rank that started them, even after SIGKILL."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

METHODS = ("fork", "spawn", "forkserver")
STARTS = """
import sys, time, multiprocessing
import torch
# A writer selects the device of its rank before it waits for work (`async_loop`, strategies/async_utils.py).
torch.cuda.device_count, torch.cuda.set_device = lambda: 1, lambda device: None
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
if __name__ == "__main__":
    queue = filesystem_async.get_write_results_queue("fork")
    # A class keeps one writer: a subclass for each.
    callers = [type(method, (async_utils.PersistentAsyncCaller,), {}) for method in sys.argv[1:]]
    print(*(caller._get_process(0, caller.__name__).pid for caller in callers), flush=True)
    time.sleep(600)
"""


@pytest.mark.thorough
def test_idle_writers_and_the_manager_of_results_end_after_sigkill(tmp_path: Path) -> None:
    """However multiprocessing started them; one rank starts them all, because it imports Megatron for seconds."""
    script = tmp_path / "rank.py"
    script.write_text(STARTS)
    command = [sys.executable, script, *METHODS]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert rank.stdout is not None
    writers = {int(word) for word in rank.stdout.readline().split()}
    assert len(writers) == len(METHODS)
    session = descendants(rank.pid)
    assert writers < session
    rank.kill()
    rank.wait()
    assert_gone(session)


def descendants(group: int) -> set[int]:
    """The processes of a group, its leader left out, as far as they do not run the interpreter's own trackers."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and int(folder.name) != group and fields[0] != "Z":
            found.add(int(folder.name))
    return found


def assert_gone(processes: set[int]) -> None:
    """All of them end; the limit is there for a failure only."""
    end = time.monotonic() + 60
    left = processes
    while left and time.monotonic() < end:
        left = {pid for pid in left if is_running(pid)}
        time.sleep(0.05)
    assert not left


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
