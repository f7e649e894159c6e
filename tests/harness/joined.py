"""Processes that share a command with `--join`, forked from one that has imported torch to save time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from mcore_ckpt_ext.cli import diff, plan, verify  # noqa: F401 - imported once, for all of them
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.cli.processes import command_team

TIME_LIMIT = 120


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@dataclass(frozen=True)
class Ended:
    """How a process ended, and its output."""

    exit_code: int | None
    output: str
    pid: int | None


def in_processes(
    count: int,
    folder: Path,
    *words: object,
    lost: Mapping[int, signal.Signals] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Run a command in several processes; some send themselves a signal once all have met."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([__name__, "torch"])
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(count), **(environment or {})}
    outputs = [folder / f"output_{rank}" for rank in range(count)]
    texts, lost = [*map(str, words), "--join"], lost or {}

    def process(rank: int) -> ForkServerProcess:
        arguments = ({**together, "RANK": str(rank)}, outputs[rank], texts, lost.get(rank))
        return forks.Process(target=_run, args=arguments)

    processes = [process(rank) for rank in range(count)]
    for one in processes:
        one.start()
    for rank, one in enumerate(processes):
        if rank not in lost:
            one.join(TIME_LIMIT)
    for one in processes:
        one.kill()
        one.join()
    return [Ended(one.exitcode, outputs[rank].read_text(), one.pid) for rank, one in enumerate(processes)]


def _run(environment: dict[str, str], output: Path, words: list[str], own_signal: signal.Signals | None) -> None:
    os.environ.update(environment)
    with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        if own_signal is not None:
            with command_team(join=True):
                os.kill(os.getpid(), own_signal)
        code = main(words)
    raise SystemExit(code)
