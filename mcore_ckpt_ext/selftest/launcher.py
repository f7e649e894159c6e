"""Starts ranks of the self-test on this node, waits for them, and ends all their processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# Not `python -m`: processes that Megatron spawns for a save would import that module, and Megatron, once more.
PROGRAM = (
    sys.executable,
    "-c",
    "import sys; from mcore_ckpt_ext.megatron.selftest.rank import main; main(sys.argv[1])",
)
HERE = "127.0.0.1"
# If a rank fails, others wait in a collective or fail as well; these have this long to report why.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.1
_ENVIRONMENT = {
    # Tensor parallelism requires it on devices before Blackwell (megatron/training/arguments.py, validate_args).
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Compiling kernels would take longer than the test itself.
    "TORCHDYNAMO_DISABLE": "1",
}


@dataclass(frozen=True)
class Ranks:
    """The ranks that this process starts, and their connection to the others.

    Attributes:
        first: number of the first one.
        count: number of ranks to start here.
        total: number of ranks on all nodes.
        first_local: number of the first one on this node; a rank uses the device with its local number.
        on_node: number of ranks on this node, including those of other processes.
        address: address of rank 0's node.
        port: port on which rank 0 listens.
    """

    first: int
    count: int
    total: int
    first_local: int
    on_node: int
    address: str
    port: int


def all_on_this_node(count: int) -> Ranks:
    """Return ranks that are all started by this process."""
    return Ranks(0, count, count, 0, count, HERE, free_port())


@dataclass(frozen=True)
class Ended:
    """How the ranks ended.

    Attributes:
        succeeded: whether all of them finished.
        reason: otherwise, why not.
        rank: the rank that failed; None if the reason is not a single rank.
    """

    succeeded: bool
    reason: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        return self.reason if self.rank is None else f"rank {self.rank} {self.reason}"


def start(
    ranks: Ranks,
    order: Path,
    *,
    progress: Callable[[], object],
    patience: float,
    program: Sequence[str] = PROGRAM,
    interruption: Callable[[], str] = lambda: "",
) -> Ended:
    """Run ranks until they end.

    Args:
        ranks: the ranks that this process starts.
        order: the order's file; the output of the ranks goes into its folder.
        progress: returns a value that changes as long as the ranks make progress.
        patience: seconds without progress after which they are ended.
        program: command line of a rank, without the order.
        interruption: returns why the ranks have to be ended although none failed; empty to continue.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(_start_rank(number, ranks, order, program) for number in range(ranks.count))
        ended = _wait(processes, progress, patience, interruption)
        return replace(ended, rank=ranks.first + ended.rank) if ended.rank is not None else ended
    finally:
        for process in processes:
            # Writers of asynchronous saves belong to the session of their rank.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def log_of(folder: Path, rank: int) -> Path:
    """Return the file with the output of a rank."""
    return folder / f"rank_{rank:05d}.log"


def _start_rank(number: int, ranks: Ranks, order: Path, program: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {
        **_ENVIRONMENT,
        **os.environ,
        "RANK": str(ranks.first + number),
        "LOCAL_RANK": str(ranks.first_local + number),
        "WORLD_SIZE": str(ranks.total),
        "LOCAL_WORLD_SIZE": str(ranks.on_node),
        "MASTER_ADDR": ranks.address,
        "MASTER_PORT": str(ranks.port),
        # The ranks need a new store, which is empty at every start.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    with log_of(order.parent, ranks.first + number).open("ab") as log:
        return subprocess.Popen(
            [*program, str(order)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    progress: Callable[[], object],
    patience: float,
    interruption: Callable[[], str],
) -> Ended:
    seen = progress()
    since = time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if failed:
            _wait_briefly(processes)
            number, code = next(iter(failed.items()))
            return Ended(False, _exit(code), number)
        if all(code == 0 for code in codes):
            return Ended(True)
        if why := interruption():
            _wait_briefly(processes)
            return Ended(False, why)
        if (now := progress()) != seen:
            seen = now
            since = time.monotonic()
        if time.monotonic() - since > patience:
            return Ended(False, f"no progress in {patience:.0f} s")
        time.sleep(_POLL_SECONDS)


def _wait_briefly(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        time.sleep(_POLL_SECONDS)


def _exit(code: int) -> str:
    return f"ended with signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def free_port() -> int:
    """Return an unused port of this node."""
    with socket.socket() as holder:
        holder.bind(("", 0))
        return int(holder.getsockname()[1])
