"""Rehearsals of loads that tests also run in real Megatron: both must have the same outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext.job.assignments import parse_assignments
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.rehearsal.rehearse import rehearse
from mcore_ckpt_ext.rehearsal.result import Rehearsal
from tests.harness.layouts import Layout


def rehearsal_of(run: Path, arguments: Mapping[str, Any], **options: Any) -> Rehearsal:
    """Rehearse the load of a real job, which had these arguments."""
    layout = ParallelLayout.from_arguments(JobArguments.of(arguments))
    sizes = layout.model_sizes()
    return rehearse(run, layout.world, sizes, changes=arguments, any_change=True, **options)


# Arguments of the pipeline split: one that the job does not set has no value, even if its checkpoint stores one.
_OF_STAGES = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
)


def rehearsal_of_resume(run: Path, layout: Layout) -> Rehearsal:
    """Rehearse the resume of a job that differs from the saving one only in its layout."""
    arguments = {
        **dict.fromkeys(_OF_STAGES),
        **parse_assignments(_stated(layout.flags)),
        "padded_vocab_size": layout.vocabulary,
        "world_size": layout.ranks,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
    }
    stages = str(arguments["pipeline_model_parallel_layout"] or "").count("|") + 1
    if layout.virtual or stages > layout.pipeline:  # as `validate_args` derives it (megatron/training/arguments.py)
        arguments["virtual_pipeline_model_parallel_size"] = 2 if layout.virtual else stages // layout.pipeline
    return rehearsal_of(run, arguments, full=True)


def _stated(flags: Sequence[str]) -> Iterator[str]:
    """Yield flags and their values in the form of `--argument`: `context_parallel_size=2`."""
    for flag, following in zip(flags, [*flags[1:], "--"], strict=True):
        if flag.startswith("--"):
            value = "true" if following.startswith("--") else following
            yield f"{flag.removeprefix('--').replace('-', '_')}={value}"


def assert_ends_alike(
    run: Path, arguments: Mapping[str, Any], error: str | None, environment: Mapping[str, str] | None = None
) -> None:
    """Check that a rehearsal of a load succeeds if the load did, and is refused if it was.

    Args:
        run: the loaded checkpoint.
        arguments: the arguments of the job.
        error: the error of its first rank, with the class; None if it succeeded.
        environment: the environment of the load.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        found = rehearsal_of(run, arguments, full=True)
    assert found.will_succeed == (error is None), f"{run}: rehearsal: {found.refusal}; job: {error}"
    assert not found.is_verbatim or error == f"ResumeRefusedError: {found.refusal}"
