"""Test `mcore-ckpt selftest` on two CPU ranks, with the same program as on GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from documentation.json_schemas import schema_of
from megatron_on_cpu import launch

from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.megatron import selftest
from mcore_ckpt_ext.selftest.jobs import Job, Machine, Order
from mcore_ckpt_ext.selftest.launcher import Ended
from mcore_ckpt_ext.selftest.plan import plan
from tests.harness.jobs import RANK_SCRIPTS, TIME_LIMIT
from tests.harness.json_schema import violations

pytestmark = pytest.mark.nightly

RANK_PROGRAM = Path(selftest.__file__).with_name("rank.py")
MACHINE = Machine(2, "gloo", "Transformer Engine is not installed", "no fp8", layers=4)
# Beside the plan: jobs that have to fail, before others that do not.
FORGETS, STOPS = "forgets its optimizer", "stops"


def start_on_cpu(order: Order) -> Ended:
    result = launch.run(
        order.jobs[0].layout.world, RANK_PROGRAM, [str(order.write())], timeout=TIME_LIMIT,
        log_file=order.folder / "rank_00000.log", plugin_files=[RANK_SCRIPTS / "without_makefile.py"],
    )  # fmt: skip
    return Ended(result.returncode == 0, f"exit code {result.returncode}")


def jobs(machine: Machine) -> tuple[Job, ...]:
    saves, resumes, *others = plan(machine)
    assert resumes.loads == saves.name
    forgets = replace(
        resumes, name="forgets", check=FORGETS, arguments=(*resumes.arguments, "--no-load-optim"), expects=""
    )
    stops = replace(resumes, name="stops", check=STOPS, arguments=(*resumes.arguments, "--no-such-flag"))
    return (saves, forgets, stops, resumes, *others)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command writes to a file, on a machine that is described to it."""
    folder = tmp_path_factory.mktemp("selftest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mcore_ckpt_ext.selftest.machine.this_machine", lambda ranks: MACHINE)
        patch.setattr("mcore_ckpt_ext.selftest.plan.plan", jobs)
        patch.setattr("mcore_ckpt_ext.cli.selftest.start_ranks", start_on_cpu)
        code = main(["selftest", "--folder", str(folder), "--json", str(folder / "report.json")])
    found = json.loads((folder / "report.json").read_text())
    assert violations(found, schema_of("selftest")) == []
    assert (code, found["exit_code"], found["passed"]) == (1, 1, False)
    assert isinstance(found, dict)
    return found


def rows(report: dict[str, Any], *checks: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["check"] in checks]


def test_every_job_of_the_plan_passes(report: dict[str, Any]) -> None:
    planned = [row for row in report["rows"] if row["check"] not in (FORGETS, STOPS)]
    assert [row for row in planned if row["outcome"] == "FAILED"] == []
    ran = [row for row in planned if row["outcome"] == "passed"]
    assert {row["model"] for row in ran} == {"gpt", "tiny gpt", "experts"}
    assert {row["format"] for row in ran} == {"dp_reshardable", "fully_reshardable"}
    resumed = [row for row in ran if row["bits_equal"] is not None]
    assert {row["layout"] for row in resumed if row["model"] == "gpt"} == {
        "TP1 x PP2 x DP1", "TP2 x PP1 x DP1", "TP1 x PP1 x DP2", "TP1 x PP2 x VPP2 x DP1",
    }  # fmt: skip
    for row in resumed:
        assert row["bits_equal"]
        assert row["elements"] > 30_000
        assert len(row["losses"]) == 3
        # The models learn: a state that is not the saved one would show in the losses, too.
        assert row["losses"][-1] < row["losses"][0]


def test_unsupported_jobs_are_skipped_with_a_reason(report: dict[str, Any]) -> None:
    skipped = [row for row in report["rows"] if row["outcome"] == "skipped"]
    expected = {(model, MACHINE.no_engine) for model in ("gpt in fp8", "gpt in blockwise fp8")}
    assert {(row["model"], row["details"][0]) for row in skipped} == expected


def test_an_optimizer_that_is_not_loaded_is_seen(report: dict[str, Any]) -> None:
    (row,) = rows(report, FORGETS)
    assert (row["outcome"], row["bits_equal"]) == ("FAILED", False)
    assert any(line.startswith("exp_avg.") for line in row["details"])


def test_a_job_that_stops_is_reported_and_the_others_run(report: dict[str, Any]) -> None:
    """`test_every_job_of_the_plan_passes`: all but the first come after it."""
    (stopped,) = rows(report, STOPS)
    assert stopped["outcome"] == "FAILED"
    assert stopped["details"][0].startswith("SystemExit: 2")
    assert [row["check"] for row in report["rows"][:3]] == ["save, asynchronously", FORGETS, STOPS]


def test_the_folder_is_kept_for_what_failed(report: dict[str, Any]) -> None:
    folder = Path(report["folder"])
    assert folder.name.startswith("mcore-ckpt-selftest-")
    assert (folder / "checkpoints" / "gpt-dp_reshardable" / "latest_checkpointed_iteration.txt").read_text() == "3"
