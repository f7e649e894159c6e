"""The result of a rehearsal, as data."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_ckpt_ext.continuity.data_order import DataOrder
from mcore_ckpt_ext.defaults import SCHEMAS

SCHEMA = SCHEMAS["plan"]


@dataclass(frozen=True)
class Rehearsal:
    """The outcome of a resume on a number of ranks, up to its first write.

    Attributes:
        path: the iteration folder.
        gpus: number of ranks.
        old_layout: the layout of the job that wrote the checkpoint, as text.
        new_layout: the layout of the job that resumes.
        megatron_version: the release that runs it.
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
        data: whether the data goes on in the same order; None if that was not reached.
    """

    schema: int
    path: str
    gpus: int
    old_layout: str
    new_layout: str
    megatron_version: str
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
    data: DataOrder | None = None
