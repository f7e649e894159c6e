"""The result of a rehearsal, as data."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA = 1


@dataclass(frozen=True)
class Rehearsal:
    """What a resume on so many ranks would do, up to its first write.

    Attributes:
        path: the iteration folder.
        gpus: number of ranks.
        old_layout: of the job that wrote the checkpoint, in words.
        new_layout: of the job that resumes.
        megatron_version: that runs it.
        iteration: that is loaded.
        optimizer_format: how the optimizer is stored.
        will_succeed: everything that was checked is as the job needs it; under the conditions of `given`.
        refusal: why it will not; None where it will.
        is_verbatim: the job prints the refusal in these words.
        loaded_by: `mcore_ckpt_ext` or `stock Megatron`.
        why: the check of the load policy that keeps stock Megatron from loading; None where stock loads.
        parameters: with optimizer state.
        parts: parts of parameters that ranks hold, those of tensor- and expert-parallel ranks counted apart.
        elements: of masters and moments that all ranks hold together.
        weights: elements of weights that are found.
        bytes_read: by all ranks together, without `--ckpt-ext-read-once`.
        proven: masters that were compared with their weights.
        proof: how they were compared, in words.
        is_full_proof: all of them were compared, not samples.
        order_sources: where it is known from which parameter lies where.
        given: what the rehearsal took for granted: it is true of a job with the same options as before.
        flags: to paste into the job's command line.
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
    proven: int = 0
    proof: str | None = None
    is_full_proof: bool = False
    order_sources: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    flags: str = ""
