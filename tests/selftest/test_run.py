"""Test that failing jobs do not end the self-test, and that their output is kept; ranks are simulated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from mcore_ckpt_ext.selftest.jobs import Job, JobResult, Order, layout_of
from mcore_ckpt_ext.selftest.launcher import Ended, log_of
from mcore_ckpt_ext.selftest.report import have_passed
from mcore_ckpt_ext.selftest.run import run

LAYOUT = layout_of(2, 2)
SAVE = Job("save", "gpt", "dp_reshardable", LAYOUT, "save")
RESUMES = [Job(name, "gpt", "dp_reshardable", LAYOUT, "resume", loads="save") for name in ("one", "two")]
LOSSES = {"4": 4.5, "5": 4.25, "6": 4.0}


def ends(order: Order, job: Job, **changes: object) -> None:
    result = {**asdict(JobResult(job.name, 1.0, 0.5, 100, (), LOSSES, ())), **changes}
    with order.results.open("a") as file:
        file.write(json.dumps(result) + "\n")


def ranks(job_by_job: Callable[[Order, Job], str]) -> Callable[[Order], Ended]:
    """Ranks that do what they are told until a job returns why it fails."""

    def start(order: Order) -> Ended:
        for job in order.jobs:
            if why := job_by_job(order, job):
                return Ended(False, why)
        return Ended(True)

    return start


def test_all_pass_and_nothing_is_left(tmp_path: Path) -> None:
    def job_by_job(order: Order, job: Job) -> str:
        ends(order, job)
        return ""

    rows, folder = run([SAVE, *RESUMES], ranks(job_by_job), tmp_path)
    assert [row.outcome for row in rows] == ["passed"] * 3
    assert [row.bits_equal for row in rows] == [None, True, True]
    assert (have_passed(rows), folder, list(tmp_path.iterdir())) == (True, None, [])


def test_other_jobs_run_after_a_failure(tmp_path: Path) -> None:
    starts = []

    def job_by_job(order: Order, job: Job) -> str:
        starts.append(job.name)
        if job.name == "one":
            return "rank 1 ended with exit code 1"
        ends(order, job)
        return ""

    rows, folder = run([SAVE, *RESUMES], ranks(job_by_job), tmp_path)
    assert starts == ["save", "one", "two"]
    assert [row.outcome for row in rows] == ["passed", "FAILED", "passed"]
    assert rows[1].details == ("rank 1 ended with exit code 1",)
    assert folder is not None
    assert [folder] == list(tmp_path.iterdir())


def test_a_rank_that_reports_why(tmp_path: Path) -> None:
    def job_by_job(order: Order, job: Job) -> str:
        if job.name == "one":
            report = order.failure("one", 1)
            report.parent.mkdir()
            report.write_text("ResumeRefusedError: no")
            return "rank 1 ended with exit code 1"
        ends(order, job)
        return ""

    rows, _ = run([SAVE, *RESUMES], ranks(job_by_job), tmp_path)
    assert rows[1].details == ("ResumeRefusedError: no",)


def test_a_rank_that_exits_is_explained_by_its_log(tmp_path: Path) -> None:
    """Megatron writes to the log, then exits: the report has only the exit code."""

    def job_by_job(order: Order, job: Job) -> str:
        report = order.failure(job.name, 1)
        report.parent.mkdir()
        report.write_text("SystemExit: 1")
        log_of(order.folder, 0).write_text("waits\n")
        log_of(order.folder, 1).write_text("begins\ncompiles\nfails to compile\nexits\n")
        return "rank 1 ended with exit code 1"

    (row,), _ = run([SAVE], ranks(job_by_job), tmp_path)
    assert row.details == ("SystemExit: 1 | compiles | fails to compile | exits",)


def test_without_a_save_nothing_is_resumed(tmp_path: Path) -> None:
    rows, _ = run([SAVE, *RESUMES], ranks(lambda order, job: "no progress in 2 s"), tmp_path)
    assert [row.outcome for row in rows] == ["FAILED"] * 3
    assert rows[2].details == ("its checkpoint was not saved",)


def test_differing_states_and_losses_fail(tmp_path: Path) -> None:
    def job_by_job(order: Order, job: Job) -> str:
        changes: dict[str, dict[str, object]] = {
            "one": {"differences": ["exp_avg.layer.weight differs"]},
            "two": {"losses": {**LOSSES, "6": 4.1}},
        }
        ends(order, job, **changes.get(job.name, {}))
        return ""

    rows, _ = run([SAVE, *RESUMES], ranks(job_by_job), tmp_path)
    assert [row.outcome for row in rows] == ["passed", "FAILED", "FAILED"]
    assert [row.bits_equal for row in rows] == [None, False, True]
    assert rows[1].details == ("exp_avg.layer.weight differs",)
    assert rows[2].details == ("losses 4.5000, 4.2500, 4.1000, without an interruption 4.5000, 4.2500, 4.0000",)


def test_a_load_in_which_this_package_did_not_take_part(tmp_path: Path) -> None:
    resumed = Job("one", "gpt", "dp_reshardable", LAYOUT, "resume", loads="save", expects="optimizer resumed from")

    def job_by_job(order: Order, job: Job) -> str:
        ends(order, job, messages=["optimizer resumed from TP1"] if job.name == "two" else ["something else"])
        return ""

    rows, _ = run([SAVE, resumed, RESUMES[1]], ranks(job_by_job), tmp_path)
    assert [row.outcome for row in rows] == ["passed", "FAILED", "passed"]
    assert "this package was not active" in rows[1].details[0]


def test_losses_that_are_no_numbers(tmp_path: Path) -> None:
    def job_by_job(order: Order, job: Job) -> str:
        ends(order, job, losses=dict.fromkeys(LOSSES, float("nan")))
        return ""

    rows, _ = run([SAVE, *RESUMES], ranks(job_by_job), tmp_path)
    assert [row.outcome for row in rows] == ["passed", "FAILED", "FAILED"]


def test_nothing_but_skipped_is_no_pass(tmp_path: Path) -> None:
    skipped = Job("save", "gpt", "dp_reshardable", LAYOUT, "save", skipped="no engine here")
    rows, _ = run([skipped], ranks(lambda order, job: "not reached"), tmp_path)
    assert [(row.outcome, row.details) for row in rows] == [("skipped", ("no engine here",))]
    assert not have_passed(rows)
