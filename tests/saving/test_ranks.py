"""The ranks of a job tell each other their problems, in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_ckpt_ext.saving.ranks import JobRanks
from mcore_ckpt_ext.saving.save import Point

Call = tuple[Point, str | None]


def rank_process(rank: int, store: Path, calls: Sequence[Call], answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(calls))
    ranks = JobRanks()
    try:
        answer = ranks.agree(*calls[rank])
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


def test_without_problems_nobody_has_one(tmp_path: Path) -> None:
    assert answers_to(tmp_path, (Point.BEGIN, None), (Point.BEGIN, None)) == [(True, None), (False, None)]


def test_the_problem_of_one_is_known_to_all(tmp_path: Path) -> None:
    known = "rank 1: no space left"
    assert answers_to(tmp_path, (Point.FINALISE, ""), (Point.FINALISE, "no space left")) == [
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
