"""Test how the ranks of a job perform phases; `tests/rehearsal/test_simulated_ranks.py` has simulated ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt_ext.errors import ResumeRefusedError, UsageError
from mcore_ckpt_ext.megatron.live import job_ranks
from mcore_ckpt_ext.megatron.live.job_ranks import perform
from mcore_ckpt_ext.megatron.live.phases import Phase, Who, agreements
from mcore_ckpt_ext.megatron.live.planning import PREPARING
from mcore_ckpt_ext.megatron.load_phases import ALL_PHASES


def noted(word: str) -> Any:
    """A function of a phase that notes in which order it is called, and with what."""
    return lambda resume, *given: resume.notes.append((word, *given)) or word


def phase(name: str, who: Who, **more: Any) -> Phase:
    return Phase(name, who, noted(who.name), **more)


def test_each_kind_of_phase_gets_its_arguments() -> None:
    resume, ranks = SimpleNamespace(notes=[]), object()
    perform([phase("one", who) for who in Who], resume, ranks)
    assert resume.notes == [
        ("ALL_ALIKE",),
        ("FIRST_RANK",),
        ("EVERY_RANK",),
        ("EACH_SHARE", 0, 1),
        ("EACH_RANK", ranks),
        ("FRAMEWORK", ranks),
    ]


def test_neighbors_of_one_name_end_with_one_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def agree(name: str, work: Any, consequence: str) -> list[Any]:
        asked.append(name)
        return [work()]

    monkeypatch.setattr(job_ranks, "agree", agree)
    phases = [
        phase("one", Who.EVERY_RANK), phase("one", Who.EACH_RANK), phase("two", Who.ALL_ALIKE),
        phase("two", Who.EVERY_RANK), phase("three", Who.FRAMEWORK), phase("four", Who.EACH_RANK),
    ]  # fmt: skip
    assert [[one.who.name for one in together] for together in agreements(phases)] == [
        ["EVERY_RANK", "EACH_RANK"], ["ALL_ALIKE"], ["EVERY_RANK"], ["FRAMEWORK"], ["EACH_RANK"],
    ]  # fmt: skip
    resume = SimpleNamespace(notes=[])
    perform(phases, resume, None)
    assert asked == ["one", "two", "four"]
    assert len(resume.notes) == len(phases)


def test_results_of_all_ranks_are_collected_and_phases_may_not_apply() -> None:
    collected: list[Any] = []
    resume = SimpleNamespace(notes=[])
    perform(
        [
            phase("one", Who.EACH_RANK, applies=lambda resume: False, collect=None),
            phase("two", Who.EACH_RANK, collect=lambda resume, ranks, results: collected.append(results)),
            phase("two", Who.EVERY_RANK, applies=lambda resume: False),
            phase("two", Who.FIRST_RANK, collect=lambda resume, ranks, results: collected.append(results)),
        ],
        resume,
        "ranks",
    )
    assert resume.notes == [("EACH_RANK", "ranks"), ("FIRST_RANK",)]
    assert collected == [["EACH_RANK"], ["FIRST_RANK"]]


def test_a_refusal_states_the_phase_and_its_consequence() -> None:
    def refuse(resume: Any) -> None:
        raise UsageError("no")

    with pytest.raises(ResumeRefusedError, match=r"while weighing; all is lost\n.*UsageError: no"):
        perform([Phase("weighing", Who.EVERY_RANK, refuse, "all is lost")], None)
    with pytest.raises(UsageError):
        perform([Phase("weighing", Who.ALL_ALIKE, refuse)], None)


def test_only_the_last_phases_of_a_resume_write() -> None:
    names = [one.name for one in ALL_PHASES]
    assert [one.writes for one in ALL_PHASES] == [False] * (len(ALL_PHASES) - 1) + [True]
    in_order = ["planning the resume", "loading the weights", "writing the optimizer"]
    assert sorted(in_order, key=names.index) == in_order
    assert set(PREPARING) <= set(ALL_PHASES)
