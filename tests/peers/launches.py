"""Runs the tests in a file of a framework's suite, in launches that always end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil
from megatron_on_cpu import launch  # type: ignore[attr-defined]
from megatron_on_cpu.time_limit import TimeLimit

from tests.peers.results import CASE, UNFINISHED, Outcome, merged

_SECONDS_TO_START = 120.0
_SECONDS_TO_END = 30.0
_WITHOUT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""As if the package were not installed: torch does not import it."""


class LeftOverError(RuntimeError):
    """A launch has left processes behind that do not end."""


@dataclass(frozen=True)
class Order:
    """What a launch is to run.

    Args:
        checkout: of the framework.
        tests: files or tests, as pytest names them from the checkout.
        with_plugin: whether the package is loaded.
        most: tests in one launch. Groups that a test does not destroy keep threads until the launch ends.
        limit: seconds for one test.
        sample: of each test function, run at most so many parameter sets, evenly spaced; None runs all.
    """

    checkout: str
    tests: Sequence[str]
    with_plugin: bool
    most: int = 40
    limit: float = 120
    sample: int | None = None

    @property
    def seconds(self) -> float:
        """Time for the whole launch."""
        return _SECONDS_TO_START + self.most * self.limit


def run_megatron(order: Order, ranks: int) -> dict[str, Outcome]:
    """Run tests of Megatron-LM's suite; returns how each ended."""

    def start(file: Path) -> str:
        result = launch.run(
            ranks,
            Path(__file__).with_name("megatron_rank.py"),
            [str(file)],
            timeout=order.seconds,
            megatron=order.checkout,
            environment={} if order.with_plugin else _WITHOUT,
        )
        return result.output

    return _run_all(order, start)


def run_colossalai(order: Order) -> dict[str, Outcome]:
    """Run tests of ColossalAI's suite; returns how each ended, and each case of theirs."""

    def start(file: Path) -> str:
        command = [sys.executable, str(Path(__file__).with_name("colossalai_session.py")), str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **({} if order.with_plugin else _WITHOUT)}
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            kill = partial(os.killpg, process.pid, signal.SIGKILL)
            try:
                with TimeLimit(process.pid, order.seconds, kill):
                    process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    kill()
            output.seek(0)
            return output.read()

    outcomes = _run_all(order, start)
    # A test that has spawned ranks ends well whatever its cases did.
    return {test: outcome for test, outcome in outcomes.items() if f"{test}{CASE}ranks" not in outcomes}


def _run_all(order: Order, start: Callable[[Path], str]) -> dict[str, Outcome]:
    """Launch until every test has ended, or a launch has run none; `start` returns its output."""
    outcomes: dict[str, Outcome] = {}
    while True:
        with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / "order.json").write_text(json.dumps({**asdict(order), "folder": name, "done": list(outcomes)}))
            output = start(folder / "order.json")
            end_left_over(folder)
            worlds = sorted(folder.glob("world*"), key=lambda world: int(world.name.removeprefix("world")))
            found: dict[str, Outcome] = {}
            for world in (folder, *worlds):
                found |= merged(sorted(world.glob("rank*.jsonl")))
            collected = _collected(folder)
        left = set(collected or ()) - outcomes.keys() - found.keys()
        outcomes |= found
        if collected is None or left and not found:
            return outcomes | {" ".join(order.tests): Outcome(UNFINISHED, output[-2000:])}
        if not left:
            return outcomes


def _collected(folder: Path) -> list[str] | None:
    with contextlib.suppress(FileNotFoundError):
        return list(json.loads((folder / "collected.json").read_text()))
    return None


def end_left_over(folder: Path) -> None:
    """Wait until the processes of a launch, which have been killed, are gone; kill what was not.

    Raises:
        LeftOverError: some do not go.
    """
    sessions = {int(file.read_text()) for file in folder.glob("session*")}
    left = list(_processes_of(sessions))
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(left, timeout=_SECONDS_TO_END)
    if alive:
        raise LeftOverError(f"processes that cannot be ended: {[process.pid for process in alive]}")


def _processes_of(sessions: Collection[int]) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                yield process
