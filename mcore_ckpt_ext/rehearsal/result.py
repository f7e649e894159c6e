"""The result of a rehearsal, as data."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_ckpt_ext.continuity.dependencies import Difference
from mcore_ckpt_ext.continuity.order_change import DataOrder
from mcore_ckpt_ext.defaults import SCHEMAS
from mcore_ckpt_ext.operations.options import RehearsalOptions

SCHEMA = SCHEMAS["plan"]


@dataclass(frozen=True)
class Rehearsal:
    """The outcome of a resume on a number of ranks, up to its first write.

    Attributes:
        path: the iteration folder.
        options: the options of the rehearsal.
        gpus: number of ranks.
        old_layout: the layout of the job that wrote the checkpoint, as text.
        new_layout: the layout of the job that resumes.
        megatron_version: the release that runs it.
        megatron_version_source: where that number is from.
        iteration: the iteration that is loaded.
        optimizer_format: the format of the stored optimizer.
        will_succeed: whether all checks passed; valid under the conditions of `given`.
        refusal: why it will fail; None if it will not.
        is_verbatim: whether the job prints the refusal in the same words.
        loaded_by: `mcore_ckpt_ext` or `stock Megatron`.
        why: the check of the load policy that excludes stock Megatron; None if stock Megatron loads.
        parameters: number of parameters with optimizer state.
        parts: number of parts of parameters, counting those of each tensor- and expert-parallel rank.
        elements: number of elements of masters and moments on all ranks together.
        weights: number of elements of weights that are found.
        bytes_read: bytes that all ranks read together, without `--ckpt-ext-read-once`: `read_in_all` of the plan.
        optimizer_bytes_read: those among them that the optimizer reads: "MB read" in the line of the resume.
        proven: number of masters that were compared with their weights.
        proof: how they were compared, as text.
        is_full_proof: whether all masters were compared, not samples.
        order_sources: the sources of the parameter order.
        given: assumptions of the rehearsal, which are true for a job with the same options as before.
        flags: flags for the job's command line.
        removed_flags: flags of the old job that contradict these, and must not be given.
        notes: changes for the user.
        data: whether the data goes on in the same order; None if that was not reached.
        differences: all that training computes otherwise than before, apart from rounding.
        replaced: arguments that were passed although the checkpoint stores another value, with both values.
    """

    schema: int
    path: str
    options: RehearsalOptions
    gpus: int
    old_layout: str
    new_layout: str
    megatron_version: str
    megatron_version_source: str
    iteration: int | None = None
    optimizer_format: str | None = None
    will_succeed: bool = False
    refusal: str | None = None
    is_verbatim: bool = False
    loaded_by: str | None = None
    why: str | None = None
    parameters: int = 0
    parts: int = 0
    elements: int = 0
    weights: int = 0
    bytes_read: int = 0
    optimizer_bytes_read: int = 0
    proven: int = 0
    proof: str | None = None
    is_full_proof: bool = False
    order_sources: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    flags: str = ""
    removed_flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    data: DataOrder | None = None
    differences: tuple[Difference, ...] = ()
    replaced: tuple[str, ...] = ()
