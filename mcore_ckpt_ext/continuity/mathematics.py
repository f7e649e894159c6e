"""Decides whether a job computes the same under another layout, but for rounding; see `dependencies`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from mcore_ckpt_ext.continuity.dependencies import BY_CHANCE, DEPENDENCIES, Difference
from mcore_ckpt_ext.continuity.release_changes import differences_of_releases
from mcore_ckpt_ext.continuity.sizes import sizes_of_job
from mcore_ckpt_ext.errors import join_some
from mcore_ckpt_ext.job.differences import differing_arguments
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.versions import Version

SAME_TRAINING: Final = "same training, but for rounding"


def differences(
    job: JobArguments, old: Mapping[str, float | None], new: Mapping[str, float | None], version: Version
) -> tuple[Difference, ...]:
    """Return what a job computes otherwise under another layout; empty if nothing but rounding.

    Args:
        job: the arguments of the job under the new layout; its sizes are not looked at.
        old: the sizes of the job that saved the checkpoint, as `sizes_of` returns them; unknown ones are unchanged.
        new: those of the job that resumes it.
        version: the release that runs.
    """
    changed = {name for name, size in old.items() if None not in (size, new[name]) and size != new[name]}
    return tuple(
        Difference(row.feature, dimensions, row.effect, row.kind, row.source, row.size)
        for row in DEPENDENCIES
        if (dimensions := tuple(dimension for dimension in row.dimensions if dimension in changed))
        and row.applies(job)
        and row.releases(version)
    )


def differences_of_jobs(written: JobArguments, running: JobArguments, version: Version) -> tuple[Difference, ...]:
    """Return what a job computes otherwise than the one that saved its checkpoint.

    Args:
        written: the arguments of the job that saved the checkpoint.
        running: the arguments of the job that resumes it.
        version: the release that runs.
    """
    by_layout = differences(running, *_sizes_of_jobs(written, running), version)
    return (*by_layout, *differences_of_releases(written, running, version))


def comparison_of_jobs(written: JobArguments, running: JobArguments, version: Version) -> str:
    """Return in one line whether a job computes the same as the one that saved its checkpoint.

    For the arguments see `differences_of_jobs`.

    Returns:
        The line; empty if neither layout, model nor computation has changed, or if the arguments of the saving job are
        unknown.
    """
    changed = differing_arguments(written, running)
    old, new = _sizes_of_jobs(written, running)
    computed = differences_of_jobs(written, running, version)
    if not written.is_complete or (old == new and not changed and not computed):
        return ""
    sentence = sentence_of(computed)
    return f"other arguments of the model: {join_some(changed)}; apart from them: {sentence}" if changed else sentence


def _sizes_of_jobs(
    written: JobArguments, running: JobArguments
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Return the sizes of both jobs from the samples on that the first one has consumed."""
    consumed = written.consumed_train_samples or 0
    return sizes_of_job(written, consumed), sizes_of_job(running, consumed)


def is_same_training(differences: Iterable[Difference]) -> bool:
    """Return True if nothing differs but rounding and what is drawn by chance."""
    return all(difference.kind == BY_CHANCE for difference in differences)


def sentence_of(found: Sequence[Difference]) -> str:
    """Return the differences in one line."""
    if not found:
        return SAME_TRAINING
    if is_same_training(found):
        features = ", ".join(difference.feature for difference in found)
        return f"{SAME_TRAINING} and {features}, which draws other elements"
    reasons = (f"{difference.feature}: {difference.effect}" for difference in found if difference.kind != BY_CHANCE)
    return f"not the same training: {'; '.join(reasons)}"
