"""The ranks of a running job, which perform the phases of a resume and end each with one agreement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcore_ckpt_ext.collectives import agreed, is_first_rank, rank_and_size
from mcore_ckpt_ext.megatron.live.phases import Phase, Who, agreements


def perform(phases: Sequence[Phase], resume: Any, ranks: Any = None) -> None:
    """Perform phases of a resume on the ranks of a running job. Collective.

    Args:
        phases: the phases, in order.
        resume: the resume that they advance.
        ranks: what phases of each rank's own part get as their last argument.

    Raises:
        ResumeRefusedError: on every rank, if some rank cannot resume.
    """
    for together in agreements(phases):
        _perform(together, resume, ranks)


def _perform(together: Sequence[Phase], resume: Any, ranks: Any) -> None:
    """Perform the phases of one agreement."""
    first = together[0]
    if len(together) == 1 and not first.applies(resume):
        return
    if not first.is_agreed:
        first.work(resume, *([ranks] if first.who is Who.FRAMEWORK else []))
        return
    performed: list[Phase] = []

    def work() -> list[Any]:
        sent: list[Any] = []
        for phase in together:
            if phase.applies(resume):
                result = _work(phase, resume, ranks)
                performed.append(phase)
                sent.append(None if phase.collect is None else result)
        return sent

    results = agreed(first.name, work, first.consequence)
    for number, phase in enumerate(performed):
        if phase.collect is not None:
            phase.collect(resume, ranks, [of_rank[number] for of_rank in results])


def _work(phase: Phase, resume: Any, ranks: Any) -> Any:
    if phase.who is Who.EACH_SHARE:
        return phase.work(resume, *rank_and_size())
    if phase.who is Who.EACH_RANK:
        return phase.work(resume, ranks)
    return phase.work(resume) if phase.who is Who.EVERY_RANK or is_first_rank() else None
