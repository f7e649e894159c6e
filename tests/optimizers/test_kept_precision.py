"""Test which state a resume rounds, by the arguments of both jobs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.optimizers.kept_precision import rounding_of
from mcore_ckpt_ext.rehearsal.rehearse import rehearse
from tests.harness.checkpoints import fixture_named

AWARE = {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": "fp32", "exp_avg_dtype": "fp32"}
OFFLOADED = {**AWARE, "optimizer_cpu_offload": True, "exp_avg_dtype": "bf16"}
LIVE = {**AWARE, "exp_avg_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("written", "running", "is_scaled_anew", "rounded"),
    [
        ({"bf16": True}, AWARE, True, ""),
        (AWARE, {**AWARE, "exp_avg_dtype": "bf16"}, False, "first moments to bf16"),
        (AWARE, LIVE, False, "first moments to bf16"),
        (OFFLOADED, LIVE, False, "first moments to bf16"),
        (LIVE, OFFLOADED, True, ""),
        (LIVE, {**AWARE, "exp_avg_dtype": "bf16"}, True, ""),
        (LIVE, {**AWARE, "exp_avg_dtype": "fp8"}, False, "first moments to fp8"),
        ({**AWARE, "exp_avg_dtype": "fp8"}, LIVE, False, "first moments to bf16"),
        ({**AWARE, "exp_avg_dtype": "fp8"}, {**AWARE, "exp_avg_dtype": "fp8"}, False, ""),
        ({**AWARE, "exp_avg_dtype": "fp8"}, {**AWARE, "exp_avg_dtype": "fp8"}, True, "first moments to fp8"),
        ({}, {**AWARE, "main_params_dtype": "fp16"}, False, "masters to fp16"),
        ({}, {**AWARE, "main_params_dtype": "fp16", "bf16": False}, False, ""),
    ],
)
def test_what_is_rounded(written: dict[str, Any], running: dict[str, Any], is_scaled_anew: bool, rounded: str) -> None:
    words = rounding_of(JobArguments.of(written), JobArguments.of(running), is_scaled_anew=is_scaled_anew)
    assert words == (f"rounded, because this job keeps them so: {rounded}" if rounded else "")


def test_a_rehearsal_says_so() -> None:
    """By the arguments of the command line, which a rehearsal can change."""
    sizes, changes = {"tensor": 1, "pipeline": 2}, {"exp_avg_dtype": "bf16", "main_params_dtype": "fp16"}
    found = rehearse(fixture_named("p47").run, 4, sizes, changes=changes)
    assert found.will_succeed, found.refusal
    assert found.notes[-1] == "rounded, because this job keeps them so: masters to fp16, first moments to bf16"
