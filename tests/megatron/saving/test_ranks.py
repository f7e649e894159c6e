"""Test that the ranks of a job exchange their problems, in separate processes."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt_ext.megatron.saving.coordinator import WriterLostError
from mcore_ckpt_ext.megatron.saving.ranks import JobRanks
from mcore_ckpt_ext.megatron.saving.save import Point
from mcore_ckpt_ext.megatron.saving.strategies import MegatronWriters

Call = tuple[Point, str | None]


def rank_process(rank: int, store: Path, calls: Sequence[Call], answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(calls))
    ranks = JobRanks()
    try:
        answer = ranks.agree_on(*calls[rank])
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    answers.put((rank, ranks.is_first, answer))
    dist.destroy_process_group()


def answers_to(folder: Path, *calls: Call) -> list[tuple[bool, str | None]]:
    """What each rank knows after its call."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [
        context.Process(target=rank_process, args=(rank, folder / "store", calls, answers))
        for rank in range(len(calls))
    ]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    return [(is_first, answer) for _, is_first, answer in found]


def test_without_problems_no_rank_reports_one(tmp_path: Path) -> None:
    assert answers_to(tmp_path, (Point.BEGIN, None), (Point.BEGIN, None)) == [(True, None), (False, None)]


def test_the_problem_of_one_is_known_to_all(tmp_path: Path) -> None:
    known = "rank 1: no space left"
    assert answers_to(tmp_path, (Point.FINALIZE, ""), (Point.FINALIZE, "no space left")) == [
        (True, known),
        (False, known),
    ]


def test_ranks_at_different_points_notice_it(tmp_path: Path) -> None:
    """What one answers to one question is no answer to another."""
    for _, answer in answers_to(tmp_path, (Point.BEGIN, None), (Point.OUTCOME, None)):
        assert (
            answer
            == "SaveFailedError: the ranks of the job are at different points of saving; found: BEGIN and OUTCOME"
        )


class Writing:
    """What Megatron's queue holds of a save: whoever asks, on all ranks, whether their writers are done."""

    def __init__(self, is_killed: bool) -> None:
        self.async_caller = self
        self.process = self if is_killed else None
        self.pid, self.exitcode = os.getpid(), -9

    def is_alive(self) -> bool:
        return False

    def sync_all_async_calls(self, is_alive: int) -> bool:
        raise AssertionError("this is Megatron's own")


def asked(is_killed: bool, is_alive: int) -> object:
    """What this rank is told that asks whether all writers are done."""
    writing = Writing(is_killed)
    queue = SimpleNamespace(async_calls=[writing], persistent=False)
    MegatronWriters({"_async_calls_queue": queue}, lambda line: None).watch_newest(lambda problem: problem)
    try:
        return writing.sync_all_async_calls(is_alive)
    except WriterLostError as error:
        return re.sub(r"pid \d+", "pid ...", str(error))


def asking_process(rank: int, store: Path, ranks: int, own: tuple[bool, int], answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    answers.put((rank, asked(*own)))
    dist.destroy_process_group()


def told_to(folder: Path, *ranks: tuple[bool, int]) -> list[object]:
    """What each rank is told; of each is given whether its writer was killed, and whether it is at work."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [
        context.Process(target=asking_process, args=(rank, folder / "store", len(ranks), own, answers))
        for rank, own in enumerate(ranks)
    ]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    return [answer for _, answer in found]


KILLED = "its writer (pid ...) was killed by SIGKILL"


@pytest.mark.parametrize(
    ("ranks", "answer"),
    [
        ([(False, 0)] * 3, True),
        ([(False, 0), (False, 1), (False, 0)], False),
        ([(False, 0), (False, 1), (True, 1)], f"rank 2: {KILLED}"),
        ([(True, 1)] * 3, "\n  ".join(f"rank {rank}: {KILLED}" for rank in range(3))),
    ],
)
def test_every_rank_learns_whether_all_writers_are_done(
    ranks: list[tuple[bool, int]], answer: object, tmp_path: Path
) -> None:
    assert told_to(tmp_path, *ranks) == [answer] * 3


@pytest.mark.parametrize("is_alive", [0, 1])
def test_all_writers_may_be_lost_at_once(is_alive: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a file system of 256 ranks goes away: 32 bits hold no sum of any mark that is more than all ranks."""

    def all_reduce(tensor: torch.Tensor, op: object = dist.ReduceOp.SUM, group: object = None) -> None:
        if op == dist.ReduceOp.SUM:
            tensor *= 1 << 8

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert asked(True, is_alive) == f"rank 0: {KILLED}"
