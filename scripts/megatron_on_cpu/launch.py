"""Runs a training script of the genuine Megatron-LM on forked CPU ranks.

From a test::

    result = launch.run(8, launch.TRAIN_GPT, arguments, timeout=180)
    assert result.returncode == 0, result.output

From a shell::

    python -m megatron_on_cpu.launch --nproc 8 [--megatron CHECKOUT] [--timeout 180] script.py [arguments]

This module imports neither torch nor Megatron: both are imported once in a subprocess (``forked_ranks``), which then
forks the ranks, so that eight of them start in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

TRAIN_GPT = Path(__file__).with_name("train_gpt.py")
"""This package's own training script, for Megatron-LM 0.19, which the PyPI package comes without."""

TIMED_OUT = 124
"""The return code of a run that was stopped at its time limit, as of coreutils' ``timeout``."""

_SCRIPTS = Path(__file__).parents[1]
_RANK_OF_LINE = re.compile(r"\[rank (\d+)\] ")
# One thread per rank, no compiler: eight ranks share a small machine, and results must not depend on it.
_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class RunResult:
    """How a run ended: the return code, every rank's output with its lines marked ``[rank N]``, and the duration."""

    returncode: int
    output: str
    seconds: float


def run(
    world_size: int,
    script: Path | str,
    arguments: Sequence[str],
    *,
    timeout: float,
    megatron: Path | str | None = None,
    environment: Mapping[str, str] | None = None,
    plugin_files: Sequence[Path | str] = (),
    log_file: Path | str | None = None,
    echo: TextIO | None = None,
) -> RunResult:
    """Run ``script`` on ``world_size`` ranks and wait for them; afterwards none of their processes is left.

    Args:
        world_size: number of ranks.
        script: the training script, run as ``__main__`` in every rank.
        arguments: its command line.
        timeout: seconds after which everything is killed; the return code is then ``TIMED_OUT``.
        megatron: a checkout of Megatron-LM; without it, the installed megatron-core.
        environment: additional environment variables.
        plugin_files: Python files that every rank executes before the script.
        log_file: receives all the output as it comes.
        echo: receives the output of the first and the last rank, and of the launcher, as it comes.
    """
    # -P: no module of the working folder is taken for one of Python's.
    command = [sys.executable, "-P", "-m", "megatron_on_cpu.forked_ranks", "--nproc", str(world_size)]
    if megatron is not None:
        command += ["--megatron", str(megatron)]
    for plugin in plugin_files:
        command += ["--plugin", str(plugin)]
    command += [str(script), *arguments]
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(_open_log(log_file))
        process = subprocess.Popen(
            command,
            env={**_ENVIRONMENT, **os.environ, **_python_path(), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        # Leaves no rank and no writer process behind, however this ends.
        stack.callback(_kill_session, process)
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _kill_session(process)

        timer = threading.Timer(timeout, expire)
        stack.callback(timer.cancel)
        timer.start()
        output = _collect(process, log, echo, shown_ranks={0, world_size - 1})
        returncode = process.wait()
    return RunResult(TIMED_OUT if expired.is_set() else returncode, output, time.monotonic() - started)


def _python_path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(_SCRIPTS), os.environ.get("PYTHONPATH"))))}


def _open_log(log_file: Path | str | None) -> contextlib.AbstractContextManager[TextIO]:
    if log_file is None:
        return tempfile.TemporaryFile("w")
    return Path(log_file).open("w")


def _collect(process: subprocess.Popen[str], log: TextIO, echo: TextIO | None, shown_ranks: set[int]) -> str:
    assert process.stdout is not None  # noqa: S101 - it was asked for
    lines = []
    for line in process.stdout:
        lines.append(line)
        log.write(line)
        rank = _RANK_OF_LINE.match(line)
        if echo is not None and (rank is None or int(rank[1]) in shown_ranks):
            echo.write(line)
            echo.flush()
    return "".join(lines)


def _kill_session(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    """Command line of ``run``."""
    parser = argparse.ArgumentParser(prog="python -m megatron_on_cpu.launch", description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, required=True, help="number of ranks")
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM (default: the installed one)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds (default: %(default)s)")
    parser.add_argument("--plugin", type=Path, action="append", default=[], help="Python file every rank runs first")
    parser.add_argument("--log", type=Path, help="file for the output of all ranks")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    result = run(
        options.nproc,
        options.script,
        options.arguments,
        timeout=options.timeout,
        megatron=options.megatron,
        plugin_files=options.plugin,
        log_file=options.log,
        echo=sys.stdout,
    )
    print(f"[launch] return code {result.returncode} after {result.seconds:.1f} s")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
