"""Starts the ranks of the self-test on this node and waits for them; afterwards none of their processes is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAM = (sys.executable, "-m", "mcore_ckpt_ext.megatron.selftest.rank")
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
class Ended:
    """How the ranks ended.

    Attributes:
        succeeded: all of them ran to their end.
        reason: otherwise, why not.
    """

    succeeded: bool
    reason: str = ""


def start(
    ranks: int,
    order: Path,
    *,
    progress: Callable[[], object],
    patience: float,
    program: Sequence[str] = PROGRAM,
) -> Ended:
    """Run all ranks on this node.

    Args:
        ranks: their number; each uses the device of its number.
        order: the order's file; the output of the ranks goes into its folder.
        progress: a value that changes as long as the ranks get on.
        patience: seconds without progress after which they are ended.
        program: command line of a rank, before the order.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        port = _free_port()
        processes.extend(_start_rank(rank, ranks, port, order, program) for rank in range(ranks))
        return _wait(processes, progress, patience)
    finally:
        for process in processes:
            # Writers of asynchronous saves are in the session of their rank.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def log_of(folder: Path, rank: int) -> Path:
    """Return the file with the output of a rank."""
    return folder / f"rank_{rank:05d}.log"


def _start_rank(rank: int, ranks: int, port: int, order: Path, program: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {
        **_ENVIRONMENT,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with log_of(order.parent, rank).open("ab") as log:
        return subprocess.Popen(
            [*program, str(order)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], progress: Callable[[], object], patience: float) -> Ended:
    seen, since = progress(), time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if failed:
            _wait_briefly(processes)
            rank, code = next(iter(failed.items()))
            return Ended(False, f"rank {rank} ended with {_exit(code)}")
        if all(code == 0 for code in codes):
            return Ended(True)
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
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])
