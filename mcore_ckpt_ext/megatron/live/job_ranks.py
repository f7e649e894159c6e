"""The ranks of a running job, which perform the phases of a resume and end each with one agreement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcore_ckpt_ext.collectives import agree, is_first_rank, rank_and_size
from mcore_ckpt_ext.megatron.live.phases import Phase, Who, agreements


def perform(phases: Sequence[Phase], resume: Any, performer: Any = None) -> None:
    """Perform phases of a resume on the ranks of a running job. Collective.

    Args:
        phases: the phases, in order.
        resume: the resume that they advance.
        performer: does what differs between ranks; phases of `Who.EACH_RANK` and `Who.FRAMEWORK` get it.

    Raises:
        ResumeRefusedError: on every rank, if some rank cannot resume.
    """
    for together in agreements(phases):
        _perform(together, resume, performer)


def _perform(together: Sequence[Phase], resume: Any, performer: Any) -> None:
    """Perform the phases of one agreement."""
    first = together[0]
    if len(together) == 1 and not first.applies(resume):
        return
    if not first.is_agreed:
        first.work(resume, *([performer] if first.who is Who.FRAMEWORK else []))
        return
    performed: list[Phase] = []

    def work() -> list[Any]:
        sent: list[Any] = []
        for phase in together:
            if phase.applies(resume):
                result = _work(phase, resume, performer)
                performed.append(phase)
                sent.append(None if phase.collect is None else result)
        return sent

    results = agree(first.name, work, first.consequence)
    for number, phase in enumerate(performed):
        if phase.collect is not None:
            phase.collect(resume, performer, [of_rank[number] for of_rank in results])


def _work(phase: Phase, resume: Any, performer: Any) -> Any:
    if phase.who is Who.EACH_SHARE:
        return phase.work(resume, *rank_and_size())
    if phase.who is Who.EACH_RANK:
        return phase.work(resume, performer)
    return phase.work(resume) if phase.who is Who.EVERY_RANK or is_first_rank() else None
