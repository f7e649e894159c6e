"""Runs a training script of the genuine Megatron-LM on forked CPU ranks.

From a test::

    result = launch.run(8, launch.TRAIN_GPT, arguments, timeout=180)
    assert result.returncode == 0, result.output

From a shell::

    python -m megatron_on_cpu.launch --nproc 8 [--megatron CHECKOUT] [--timeout 180] script.py [arguments]

This module imports neither torch nor Megatron: both are imported once in a subprocess (``fork_server``), which then
forks jobs, and each job forks its ranks, so that eight ranks start at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from megatron_on_cpu.fork_server import NotStartedError, fork_server
from megatron_on_cpu.time_limit import TimeLimit

TRAIN_GPT = Path(__file__).with_name("train_gpt.py")
"""This package's own training script for Megatron-LM 0.19, which the PyPI package lacks."""

PRECISION_AWARE = Path(__file__).with_name("precision_aware.py")
"""Plugin for jobs with ``--use-precision-aware-optimizer``."""

SYNTHETIC_TRAINING = Path(__file__).with_name("synthetic_training.py")
"""Plugin for jobs whose model cannot run on a CPU."""

ENGINE_PASSES = Path(__file__).with_name("engine_passes.py")
"""Plugin with which models of Transformer Engine's modules run on a CPU."""

CPU_OFFLOAD = Path(__file__).with_name("cpu_offload.py")
"""Plugin for jobs with ``--optimizer-cpu-offload``."""

CONTEXT_PARALLEL = Path(__file__).with_name("context_parallel.py")
"""Plugin for jobs with ``--context-parallel-size``."""

UNEVEN_MASKS = Path(__file__).with_name("uneven_masks.py")
"""Plugin for jobs with ``--eod-mask-loss``, so that samples have different numbers of tokens."""

TRAIN_ONLY = Path(__file__).with_name("train_only.py")
"""Plugin for jobs that train only some parameters."""

TIMED_OUT = 124
"""The return code of a run that was stopped at its time limit, as of coreutils' ``timeout``."""

_SCRIPTS = Path(__file__).parents[1]
RANK_OF_LINE = re.compile(r"\[rank (\d+)\] ")
# One thread per rank, no compiler: eight ranks share a small machine, and results must not depend on it.
_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
}
# Whatever the caller's environment names: a rank that used a GPU by mistake would not show it.
_NO_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class RunResult:
    """The result of a run: the exit code, the output of all ranks (lines marked ``[rank N]``), and the duration."""

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
        arguments: command line of the script.
        timeout: seconds after which everything is killed; the return code is then ``TIMED_OUT``. Time in which the
            job waits for a processor does not count.
        megatron: a checkout of Megatron-LM; without it, the installed megatron-core.
        environment: additional environment variables.
        plugin_files: Python files that every rank executes before the script.
        log_file: receives all output as it is written.
        echo: receives the output of the first and the last rank, and of the launcher, as it is written.
    """
    order = {
        "ranks": world_size,
        "plugins": [str(Path(plugin).resolve()) for plugin in plugin_files],
        "script": str(Path(script).resolve()),
        "arguments": list(arguments),
        "environment": {**_ENVIRONMENT, **os.environ, **_NO_DEVICES, **_python_path(), **(environment or {})},
        "folder": str(Path.cwd()),
    }
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(_open_log(log_file))
        try:
            server = fork_server(megatron, order["environment"])
        except NotStartedError as error:
            log.write(str(error))
            return RunResult(1, str(error), time.monotonic() - started)
        job, stream = server.fork(order)
        stack.enter_context(stream)
        # No rank and no writer process remains, regardless of how the run ends.
        stack.callback(_kill_session, job)
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _kill_session(job)

        stack.enter_context(TimeLimit(job, timeout, expire))
        try:
            output = _collect(stream, log, echo, shown_ranks={0, world_size - 1})
            returncode = server.wait()
        except BaseException:
            server.close()  # otherwise it would report the end of this job as that of the next
            raise
    return RunResult(TIMED_OUT if expired.is_set() else returncode, output, time.monotonic() - started)


def _python_path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(_SCRIPTS), os.environ.get("PYTHONPATH"))))}


def _open_log(log_file: Path | str | None) -> contextlib.AbstractContextManager[TextIO]:
    if log_file is None:
        return tempfile.TemporaryFile("w")
    return Path(log_file).open("w")


def _collect(stream: TextIO, log: TextIO, echo: TextIO | None, shown_ranks: set[int]) -> str:
    lines = []
    for line in stream:
        lines.append(line)
        log.write(line)
        rank = RANK_OF_LINE.match(line)
        if echo is not None and (rank is None or int(rank[1]) in shown_ranks):
            echo.write(line)
            echo.flush()
    return "".join(lines)


def _kill_session(job: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job, signal.SIGKILL)


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
