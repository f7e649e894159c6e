"""Changes of the computation that another release of Megatron brings under the same flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcore_ckpt_ext.continuity.dependencies import DEFECT, Difference
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import PASSES_ON_INTERPOLATION, Capability
from mcore_ckpt_ext.versions import Version


@dataclass(frozen=True, kw_only=True)
class ReleaseChange:
    """A flag that only some releases apply.

    Attributes:
        flag: the flag.
        capability: the behavior of the releases that apply it.
        applies: returns True for a job to which it matters.
    """

    flag: str
    capability: Capability
    applies: Callable[[JobArguments], bool]


def _interpolates(job: JobArguments) -> bool:
    """Return whether a job of Megatron-LM is to interpolate positions.

    Hybrid models are left out: their builder has passed the flag on since 0.18.
    """
    is_hybrid = job.raw.get("hybrid_layer_pattern") or job.raw.get("hybrid_override_pattern")
    has_rope = job.position_embedding_type == "rope" and not is_hybrid
    return job.is_complete and has_rope and job.rotary_seq_len_interpolation_factor not in (None, 1)


CHANGES = (
    ReleaseChange(
        flag="--rotary-seq-len-interpolation-factor", capability=PASSES_ON_INTERPOLATION, applies=_interpolates
    ),
)


def differences_of_releases(written: JobArguments, running: JobArguments, version: Version) -> tuple[Difference, ...]:
    """Return what a release computes otherwise than that of a checkpoint, under the same flags.

    Args:
        written: the arguments of the job that saved the checkpoint.
        running: the arguments of the job that resumes it.
        version: the release that runs.
    """
    computed = []
    for change in CHANGES:
        if not (change.applies(written) and change.applies(running)):
            continue
        capability = change.capability
        before = written.release_has(capability)
        if before != capability.is_of(version):
            effect = (
                f"Megatron ignores it before {capability.since}, and the job that saved the checkpoint had it applied: "
                f"resume with Megatron {capability.since} or later"
                if before
                else f"Megatron applies it since {capability.since}, and the job that saved the checkpoint trained "
                "without: leave it out to go on as before"
            )
            computed.append(Difference(change.flag, (), effect, DEFECT, capability.source))
    return tuple(computed)
