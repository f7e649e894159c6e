"""Test the jobs of the self-test for machines of several sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext.selftest.jobs import Job, Machine, Order, layout_of
from mcore_ckpt_ext.selftest.models import MODELS
from mcore_ckpt_ext.selftest.plan import EIGHT_RANKS, job_of_eight_ranks, layouts, plan

SIZES = [1, 2, 3, 4, 6, 8, 16]


def resumes(jobs: tuple[Job, ...], model: str) -> set[str]:
    return {str(job.layout) for job in jobs if job.model == model and job.loads and not job.skipped}


@pytest.mark.parametrize("ranks", SIZES)
def test_each_resume_follows_its_save(ranks: int) -> None:
    saved = {EIGHT_RANKS: job_of_eight_ranks(Machine(8))}
    for job in plan(Machine(ranks)):
        assert job.name not in saved
        assert job.layout.world == ranks
        assert job.layout.tensor * job.layout.pipeline * job.layout.data == ranks
        assert job.layout.data % job.layout.expert == 0
        if job.loads is not None:
            assert (saved[job.loads].model, saved[job.loads].format) == (job.model, job.format)
        saved[job.name] = job


@pytest.mark.parametrize("ranks", SIZES)
def test_names_are_names_of_files(ranks: int) -> None:
    assert all(set(job.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_") for job in plan(Machine(ranks)))


def test_every_layout_that_eight_ranks_allow() -> None:
    every = {str(layout) for layout in layouts(8, 8)}
    assert len(every) == 10
    assert resumes(plan(Machine(8)), "gpt") == {*every, "TP1 x PP2 x VPP2 x DP4"}


def test_one_rank_resumes_what_it_saved() -> None:
    jobs = plan(Machine(1))
    assert resumes(jobs, "gpt") == resumes(jobs, "experts") == {"TP1 x PP1 x DP1"}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_experts_change_every_size(ranks: int) -> None:
    found = [job.layout for job in plan(Machine(ranks)) if job.model == "experts"]
    for sizes in zip(*((one.tensor, one.pipeline, one.expert, one.data) for one in found), strict=True):
        assert len(set(sizes)) > 1


def test_unsupported_jobs_are_skipped_with_a_reason() -> None:
    jobs = plan(Machine(2, no_engine="no engine here", no_fp8="no fp8 here"))
    assert {job.skipped for job in jobs if job.model == "gpt in fp8"} == {"no engine here"}
    (save, *_) = jobs
    assert save.arguments[save.arguments.index("--transformer-impl") + 1] == "local"
    jobs = plan(Machine(2, no_fp8="no fp8 here"))
    assert {job.skipped for job in jobs if job.model == "gpt in fp8"} == {"no fp8 here"}
    assert "--transformer-impl" not in jobs[0].arguments
    assert not any(job.skipped for job in plan(Machine(2)))
    (once,) = (job for job in plan(Machine(1)) if job.check == "resume, read once")
    assert once.skipped.startswith("no two ranks read the same")


@pytest.mark.parametrize("ranks", SIZES)
def test_in_blockwise_fp8_no_block_is_cut(ranks: int) -> None:
    jobs = [job for job in plan(Machine(ranks)) if job.model == "gpt in blockwise fp8"]
    assert [job.loads is not None for job in jobs] == [False, True]
    for job in jobs:
        assert job.layout.tensor == 1
        assert number(job, "--hidden-size") % 128 == number(job, "--seq-length") % 128 == 0
        assert job.arguments[job.arguments.index("--fp8-recipe") + 1] == "blockwise"
    (save, resume) = (job for job in plan(Machine(ranks, no_blockwise="no blocks")) if job.model == jobs[0].model)
    assert save.skipped == resume.skipped == "no blocks"


def test_the_vocabulary_has_the_same_padding_under_each_layout() -> None:
    padded = {
        (job.model, number(job, "--make-vocab-size-divisible-by") * job.layout.tensor) for job in plan(Machine(8))
    }
    assert padded == {(model, 64 if model == "tiny gpt" else 128) for model in MODELS}


def number(job: Job, flag: str) -> int:
    return int(job.arguments[job.arguments.index(flag) + 1])


def test_the_batch_of_a_resume_is_that_of_its_save() -> None:
    shipped = job_of_eight_ranks(Machine(8))
    for ranks in (1, 2, 4, 8, 16):
        (job,) = (job for job in plan(Machine(ranks)) if job.loads == EIGHT_RANKS)
        assert not job.skipped
        assert number(job, "--global-batch-size") == number(shipped, "--global-batch-size") == 16
    (job,) = (job for job in plan(Machine(6)) if job.loads == EIGHT_RANKS)
    assert job.skipped == "16 samples cannot be divided among 6 ranks"


@pytest.mark.parametrize("ranks", SIZES)
def test_one_job_saves_asynchronously(ranks: int) -> None:
    """Starting its writers takes longer than a job."""
    (save,) = (job for job in plan(Machine(ranks)) if "--async-save" in job.arguments)
    assert save.loads is None


@pytest.mark.parametrize("ranks", SIZES)
def test_each_batch_can_be_divided(ranks: int) -> None:
    """Among the data-parallel ranks, and then into at least one micro batch for each stage, by turns."""
    for job in plan(Machine(ranks)):
        if not job.skipped:
            at_once = number(job, "--micro-batch-size") * job.layout.data
            batches, rest = divmod(number(job, "--global-batch-size"), at_once)
            assert (rest, batches % job.layout.pipeline) == (0, 0), job.name
            assert batches >= job.layout.pipeline


def test_orders_are_read_as_written(tmp_path: Path) -> None:
    order = Order(tmp_path, plan(Machine(4)))
    assert Order.read(order.write()) == order


def test_names_of_layouts() -> None:
    assert str(layout_of(8, 2, 2)) == "TP2 x PP2 x DP2"
    assert str(layout_of(8, 1, 2, 4)) == "TP1 x PP2 x EP4 x DP4"
