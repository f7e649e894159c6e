"""Test loads by Megatron Core itself, without process groups; `tests/jobs/test_own_loops.py` has those with ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import megatron.core
import pytest
from megatron.core import dist_checkpointing

from mcore_ckpt_ext.continuity.data_order import order_in_another_loop
from mcore_ckpt_ext.errors import ModelMismatchError, UnsupportedCheckpointError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron import core_load
from mcore_ckpt_ext.megatron.core_load import wrap_load, wrap_load_state_dict
from mcore_ckpt_ext.megatron.core_phases import DECIDING, CoreRank, CoreResume
from mcore_ckpt_ext.megatron.decision_phases import ASSESSMENT
from mcore_ckpt_ext.megatron.live.resume import ResumeOptions
from mcore_ckpt_ext.megatron.load_assessment import LoadAssessment
from mcore_ckpt_ext.megatron.load_facts import UNSTATED, Loop
from mcore_ckpt_ext.megatron.load_request import LoadPlan
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.policy import LoadDecision
from mcore_ckpt_ext.megatron.required_order import check_required_order
from tests.harness.checkpoints import fixture_named

_UNKNOWN = order_in_another_loop(JobArguments.of({}, is_complete=False), JobArguments.of({}))


def test_an_earlier_megatron_is_told_how_to_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.19 it ends with an error about `common.pt`, which p10 lacks."""
    monkeypatch.setattr(megatron.core, "__version__", "0.16.1")
    folder = fixture_named("p10").iteration
    with pytest.raises(UnsupportedCheckpointError, match="later release") as caught:
        wrap_load(dist_checkpointing.load)({}, str(folder))
    assert caught.value.details["hint"].endswith(f"{folder} OUTPUT --to torch_dist --megatron-version 0.16")


def test_the_order_of_the_data_of_another_loop_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(core_load, "announce", said.append)
    plan = LoadPlan()
    plan.order = _UNKNOWN
    plan.prepared = SimpleNamespace(prove=lambda: SimpleNamespace(fill=lambda: "optimizer resumed"))
    wrap_load_state_dict(lambda optimizer, state: pytest.fail("called"))(None, plan)
    (line,) = said
    assert line.startswith("optimizer resumed; data: goes on at an unknown sample, not known whether in the same order")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_decision_of_any_rank_against_megatron_counts(rank: int, tmp_path: Path) -> None:
    """Stock Megatron may fail on one pipeline stage alone."""
    resume = CoreResume(LoadSession(tmp_path), UNSTATED, ResumeOptions())
    decisions = [LoadDecision(Loop.CORE), LoadDecision(Loop.CORE)]
    decisions[rank] = LoadDecision(Loop.CORE, reason="empty groups")
    assert ASSESSMENT.collect is not None
    ASSESSMENT.collect(resume, None, [LoadAssessment(tmp_path, decision) for decision in decisions])
    assert resume.assessment is not None
    assert resume.assessment.decision.reason == "empty groups"


def test_ranks_without_an_optimizer_are_named_where_megatron_cannot_load(tmp_path: Path) -> None:
    resume = CoreResume(LoadSession(tmp_path), UNSTATED, ResumeOptions())
    looking, *_, refusing = DECIDING
    looks = [CoreRank(None).look(resume) for _ in range(2)]
    assert looking.collect is not None
    looking.collect(resume, None, [looks[0], looks[1]._replace(has_request=True)])
    assert not refusing.applies(resume)
    resume.assessment = LoadAssessment(tmp_path, LoadDecision(Loop.CORE))
    assert not refusing.applies(resume)
    resume.assessment = LoadAssessment(tmp_path, LoadDecision(Loop.CORE, reason="layout"))
    assert refusing.applies(resume)
    with pytest.raises(UnsupportedCheckpointError, match="some ranks have no optimizer") as caught:
        refusing.work(resume)
    assert caught.value.details["found"].startswith("no optimizer on rank 0,")


@pytest.mark.parametrize("required", [True, False])
def test_an_unknown_order_is_refused_if_the_user_requires_the_same(
    required: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MCORE_CKPT_EXT_DATA_ORDER", "required" if required else "warn")
    refusal = pytest.raises(ModelMismatchError, match="or that is unknown") if required else nullcontext()
    with refusal as caught:
        check_required_order(_UNKNOWN, None, tmp_path)
    assert caught is None or "MCORE_CKPT_EXT_DATA_ORDER" in caught.value.details["expected"]
