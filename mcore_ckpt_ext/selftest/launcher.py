"""Starts ranks of the self-test on this node and waits for them; afterwards none of their processes is left."""

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

# Not `python -m`: processes that Megatron spawns for a save would import that module, and so Megatron, once more.
PROGRAM = (
    sys.executable, "-c", "import sys; from mcore_ckpt_ext.megatron.selftest.rank import main; main(sys.argv[1])"
)  # fmt: skip
HERE = "127.0.0.1"
# One rank that fails leaves the others in a collective; those that fail too get this long to report why.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.1
_ENVIRONMENT = {
    # Tensor parallelism needs it on devices before Blackwell (megatron/training/arguments.py, validate_args).
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Compiling kernels would take longer than all else.
    "TORCHDYNAMO_DISABLE": "1",
}


@dataclass(frozen=True)
class Ranks:
    """The ranks that this process starts, and where they meet the others.

    Attributes:
        first: number of the first one.
        count: how many are started here.
        total: how many there are on all nodes.
        first_local: number of the first one on this node; a rank uses the device of its number there.
        on_node: how many there are on this node, whoever starts them.
        address: of the node of rank 0.
        port: on which rank 0 listens.
    """

    first: int
    count: int
    total: int
    first_local: int
    on_node: int
    address: str
    port: int


def all_on_this_node(count: int) -> Ranks:
    """Return ranks of which no other process starts any."""
    return Ranks(0, count, count, 0, count, HERE, free_port())


@dataclass(frozen=True)
class Ended:
    """How the ranks ended.

    Attributes:
        succeeded: all of them ran to their end.
        reason: otherwise, why not.
        rank: the one that failed; None where it is not one.
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
    """Run ranks to their end.

    Args:
        ranks: those that this process starts.
        order: the order's file; the output of the ranks goes into its folder.
        progress: a value that changes as long as the ranks get on.
        patience: seconds without progress after which they are ended.
        program: command line of a rank, before the order.
        interruption: why these ranks are to be ended, although none of them has failed; empty as long as they are not.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(_start_rank(number, ranks, order, program) for number in range(ranks.count))
        ended = _wait(processes, progress, patience, interruption)
        return replace(ended, rank=ranks.first + ended.rank) if ended.rank is not None else ended
    finally:
        for process in processes:
            # Writers of asynchronous saves are in the session of their rank.
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
        # The ranks have a store of their own, which is empty each time they are started.
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
    seen, since = progress(), time.monotonic()
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
            seen, since = now, time.monotonic()
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
    """Return a port of this node on which nobody listens."""
    with socket.socket() as holder:
        holder.bind(("", 0))
        return int(holder.getsockname()[1])
