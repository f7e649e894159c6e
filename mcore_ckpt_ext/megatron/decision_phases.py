"""The phases that decide who loads an optimizer, stock Megatron or this package, for every loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_ckpt_ext.formats.sidecar_file import find_sidecar
from mcore_ckpt_ext.layout.sidecar import order_digests
from mcore_ckpt_ext.megatron.live.phases import Phase, Who
from mcore_ckpt_ext.megatron.live.resume import Resume
from mcore_ckpt_ext.megatron.load_assessment import LoadAssessment
from mcore_ckpt_ext.megatron.load_facts import LoadFacts
from mcore_ckpt_ext.megatron.policy import decide
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.optimizers.table import shows_names


@dataclass
class AssessedResume(Resume):
    """A resume of which it is decided who loads the optimizer.

    Attributes:
        assessment: who loads the optimizer, and why; None before it is decided, and if there is none.
        recorded_orders: a digest of the sidecar's order for each gradient buffer; empty if it does not matter.
    """

    assessment: LoadAssessment | None = field(default=None, init=False)
    recorded_orders: Mapping[tuple[int, int], str] = field(default_factory=dict, init=False)


def _take_assessment(resume: AssessedResume, performer: Any, assessments: Sequence[LoadAssessment | None]) -> None:
    # Stock Megatron may fail on one pipeline stage alone.
    made = filter(None, assessments)
    resume.assessment = min(made, key=lambda assessment: assessment.decision.is_stock, default=None)
    if resume.assessment is not None:
        resume.session = resume.session.with_folder(resume.assessment.folder)


def _depends_on_order(resume: AssessedResume) -> bool:
    """Return True if stock Megatron is to load arrays that do not have the names of parameters."""
    if resume.assessment is None or resume.assessment.is_presented:
        return False
    decision = resume.assessment.decision
    return decision.is_stock and not shows_names(decision.optimizer_format)


def _recorded_orders(resume: AssessedResume) -> Mapping[tuple[int, int], str]:
    """Return the order that the sidecar records; its layout may be another than the live one."""
    sidecar = find_sidecar(resume.session.index).sidecar
    return {} if sidecar is None else order_digests(sidecar.groups)


def _take_orders(resume: AssessedResume, performer: Any, orders: Sequence[Mapping[tuple[int, int], str]]) -> None:
    resume.recorded_orders = orders[0]


def _decide_again(resume: AssessedResume, performer: Any, differs: Sequence[bool]) -> None:
    if any(differs) and (assessment := resume.assessment) is not None:
        before = assessment.decision
        facts = LoadFacts(
            before.loop, megatron_version(), before.optimizer_format, before.is_moved, is_packed_otherwise=True
        )
        decision = replace(decide(facts), omits_random_states=before.omits_random_states)
        resume.assessment = replace(assessment, decision=decision)


ASSESSMENT = Phase(
    "looking at the checkpoint",
    Who.EACH_RANK,
    lambda resume, performer: performer.assess(resume),
    collect=_take_assessment,
)
"""Who loads the optimizer?"""
PARAMETER_ORDER = (
    Phase(
        "reading the recorded order of the parameters",
        Who.FIRST_RANK,
        _recorded_orders,
        collect=_take_orders,
        applies=_depends_on_order,
    ),
    Phase(
        "comparing the order of the parameters",
        Who.EACH_RANK,
        lambda resume, performer: performer.packs_otherwise(resume.recorded_orders),
        collect=_decide_again,
        applies=lambda resume: bool(resume.recorded_orders),
    ),
)
"""Decide again if the sidecar, if any, gives parameters other places in the buffers.

It matters only if arrays do not have the names of parameters. Other parameters may be trained, or their modules
registered in another order. Under an unchanged layout stock Megatron then mixes up the state of parameters of equal
size. With remainders no comparison would reveal it: every pair of a weight and a remainder forms a valid master.
"""
