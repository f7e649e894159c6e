"""Rehearsals of loads that tests run in genuine Megatron anyway: both have to end alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.options import PINS
from mcore_ckpt_ext.rehearsal.rehearse import rehearse_job
from mcore_ckpt_ext.rehearsal.result import Rehearsal


def rehearsal_of(run: Path, arguments: Mapping[str, Any], **options: Any) -> Rehearsal:
    """Rehearse the load of a genuine job, which had these arguments."""
    layout = ParallelLayout.from_arguments(JobArguments.of(arguments))
    sizes = {name: getattr(layout, name) for name in PINS.values()}
    return rehearse_job(run, layout.world, sizes, changes=arguments, **options)


def assert_ends_alike(
    run: Path, arguments: Mapping[str, Any], error: str | None, environment: Mapping[str, str] | None = None
) -> None:
    """A rehearsal of a load succeeds where the load did, and is refused where it was.

    Args:
        run: what was loaded.
        arguments: of the job.
        error: what its first rank raised, with the class.
        environment: of the load.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        found = rehearsal_of(run, arguments, full=True)
    assert found.will_succeed == (error is None), f"{run}: rehearsal: {found.refusal}; job: {error}"
    assert not found.is_verbatim or error == f"ResumeRefusedError: {found.refusal}"
