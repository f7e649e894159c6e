"""Test which process prints an error as JSON: one for each command, however many processes share it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mcore_ckpt_ext.cli.join import reports_errors

BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"}
SHARED, ALONE = 1, 4


@pytest.mark.parametrize(
    ("words", "variables", "number", "reports"),
    [
        ("selftest --json", STEP, "SLURM_PROCID", SHARED),
        ("verify run --join --json", STEP, "SLURM_PROCID", SHARED),
        ("verify run --json", STEP, "SLURM_PROCID", ALONE),
        ("verify selftest --json", STEP, "SLURM_PROCID", ALONE),
        ("verify run --json", TORCHRUN, "RANK", SHARED),
        ("selftest --json", {**TORCHRUN, **STEP, "SLURM_PROCID": "1"}, "RANK", SHARED),  # srun torchrun
        ("verify run --join --json", {}, "RANK", SHARED),
        ("verify run --json", {}, "RANK", ALONE),  # a training pod's shell
        ("selftest --json", {}, "RANK", ALONE),
    ],
)
def test_processes_that_report(words: str, variables: Mapping[str, str], number: str, reports: int) -> None:
    assert sum(reports_errors(words.split(), {**variables, number: str(rank)}) for rank in range(4)) == reports


@pytest.mark.parametrize("words", ["selftest", "verify run", "verify run --join"])
def test_a_command_of_a_batch_script_reports(words: str) -> None:
    """Its process has the number 0, and its job several tasks, but it shares nothing."""
    assert reports_errors(words.split(), BATCH)
    assert reports_errors(words.split(), {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
