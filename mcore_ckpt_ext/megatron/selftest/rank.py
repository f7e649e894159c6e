"""The program of each rank of the self-test: it runs the jobs of an order file, one after the other.

Rank 0 compares the live state of all ranks with the state at the save, and appends the differences to the results. A
job that fails ends the process; the launcher then ends ranks that still wait for it in a collective.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from mcore_ckpt_ext.megatron.selftest.live_state import live_state
from mcore_ckpt_ext.megatron.selftest.training import Training
from mcore_ckpt_ext.patching.log import NAME, LoggedLines, own_logger
from mcore_ckpt_ext.patching.singletons import PROCESS
from mcore_ckpt_ext.selftest.jobs import LAST, SAVED, Job, JobResult, Order
from mcore_ckpt_ext.selftest.state import State, differences, number_of_elements


def main(path: str) -> None:
    """Run all jobs of an order file.

    Args:
        path: the file.
    """
    order = Order.read(Path(path))
    for job in order.jobs:
        with _reporting_failure(order.failure(job.name, _rank())):
            _run(order, job)


@contextmanager
def _reporting_failure(report: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise


def _run(order: Order, job: Job) -> None:
    started = time.monotonic()
    with _environment(job), _messages() as messages:
        place = ("--load", job.loads) if job.loads is not None else ("--save", job.name)
        training = Training([*job.arguments, place[0], str(order.checkpoints(place[1]))])
        setup_seconds = time.monotonic() - started
        elements, differences = (_train_and_save if job.loads is None else _compare)(order, job, training)
        losses = {}
        while training.arguments.iteration < LAST:
            loss = training.step()
            losses[training.arguments.iteration] = loss
        training.finish()
        _write_losses(order, job, losses)
        training.close()
    gc.collect()
    torch.distributed.barrier()
    if _rank() == 0:
        named = json.loads(order.losses(job.name).read_text(encoding="utf-8"))
        seconds = time.monotonic() - started
        result = JobResult(job.name, seconds, setup_seconds, elements, differences, named, messages)
        with order.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
    torch.distributed.barrier()


def _train_and_save(order: Order, job: Job, training: Training) -> tuple[int, list[str]]:
    """Train up to the save; the live state there is the reference for all jobs that resume it."""
    while training.arguments.iteration < SAVED:
        training.step()
    _take_down(order, job, training)
    training.save()
    return _number_of_elements(order.state(job.name)), []


def _compare(order: Order, job: Job, training: Training) -> tuple[int, list[str]]:
    """Compare the live state after the load with the live state at the save."""
    _take_down(order, job, training)
    if _rank() != 0 or job.loads is None:
        return 0, []
    loaded = State.load(order.state(job.name))
    return number_of_elements(loaded), differences(State.load(order.state(job.loads)), loaded)


def _number_of_elements(folder: Path) -> int:
    return number_of_elements(State.load(folder)) if _rank() == 0 else 0


def _take_down(order: Order, job: Job, training: Training) -> None:
    state = live_state(training.chunks, training.optimizer, training.scheduler, training.arguments)
    state.save(order.state(job.name) / f"rank_{_rank():05d}.pt")
    torch.distributed.barrier()


def _write_losses(order: Order, job: Job, losses: dict[int, float | None]) -> None:
    """Write the losses; the last rank does, since it is on the last pipeline stage under each layout."""
    if _rank() == torch.distributed.get_world_size() - 1:
        path = order.losses(job.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(losses), encoding="utf-8")
    torch.distributed.barrier()


@contextmanager
def _environment(job: Job) -> Iterator[None]:
    """Set a job's variables; afterwards remove the variables that Megatron set, such as NVTE_FLASH_ATTN."""
    before = dict(os.environ)
    os.environ.update(job.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Collector(logging.Handler):
    """Stores the package's log lines, and prints them."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Store a line and print it."""
        self._lines.append(self.format(record))
        sys.stderr.write(f"[{NAME}] {self._lines[-1]}\n")


@contextmanager
def _messages() -> Iterator[list[str]]:
    """Collect the package's log lines; each job logs all lines, as in a process of its own."""
    logger = own_logger()
    lines = list[str]()
    collector = _Collector(lines)
    logger.addHandler(collector)
    PROCESS.one(LoggedLines).clear()
    try:
        yield lines
    finally:
        logger.removeHandler(collector)


def _rank() -> int:
    return int(os.environ["RANK"])


if __name__ == "__main__":
    main(sys.argv[1])
