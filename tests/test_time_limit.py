"""Test the time limit of jobs: a hang reaches it, a busy machine does not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
from megatron_on_cpu.time_limit import TimeLimit, charge

SPIN, SLEEP = "while True: pass", "import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("ran", "waited", "charged"),
    [
        (0.0, 0.0, 1.0),  # asleep: it hangs
        (1.0, 0.0, 1.0),  # one thread that spins, with a processor of its own
        (0.1, 0.9, 0.1),  # one thread that is starved
        (2.0, 6.0, 1.0),  # eight ranks that share two processors among themselves alone
        (0.2, 7.8, 0.1),  # the same ranks beside many other processes
        (0.01, 0.09, 0.91),  # nearly always asleep, on a busy machine
    ],
)
def test_only_what_a_job_does_not_get_is_left_out(ran: float, waited: float, charged: float) -> None:
    assert charge(1.0, ran, waited, processors=2) == pytest.approx(charged)


def _started(program: str, niceness: int = 0) -> subprocess.Popen[bytes]:
    command = ["nice", "-n", str(niceness), sys.executable, "-c", program]
    return subprocess.Popen(command, start_new_session=True)


@pytest.mark.thorough
@pytest.mark.parametrize("program", [SLEEP, SPIN])
def test_a_job_that_hangs_is_ended(program: str) -> None:
    job, expired = _started(program), threading.Event()
    try:
        with TimeLimit(job.pid, 1.0, expired.set):
            assert expired.wait(120)
    finally:
        job.kill()
        job.wait()


@pytest.mark.thorough
def test_a_job_that_gets_no_processor_is_left_alone() -> None:
    """Beside processes that leave it next to nothing, a job of low priority is not charged for most of the time."""
    others = [_started(SPIN) for _ in range(2 * len(os.sched_getaffinity(0)))]
    job, expired = _started(SPIN, niceness=19), threading.Event()
    try:
        time.sleep(1)  # until all of them run
        begun = time.monotonic()
        with TimeLimit(job.pid, 3.0, expired.set) as limit:
            expired.wait(8)
        assert limit.charged < (time.monotonic() - begun) / 2
    finally:
        for process in (job, *others):
            process.kill()
            process.wait()
