"""A description of the optimizer that a state belongs to, as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, FP32_PARAM, PARAM_REMAINDER
from mcore_ckpt_ext.optimizers.groups import LION, keeps_nothing, rule_of

MOMENTUM = "momentum_buffer"
_KNOWN = (FP32_PARAM, PARAM_REMAINDER, EXP_AVG, EXP_AVG_SQ, MOMENTUM)


def describe_optimizers(kinds: Collection[str], groups: Iterable[Mapping[str, Any]], arguments: JobArguments) -> str:
    """Describe the optimizers with state of these kinds, and how they store it.

    Returns:
        Empty without an optimizer.
    """
    groups = list(groups)
    names = []
    if not kinds:
        return "SGD" if keeps_nothing(groups) else ""
    if arguments.raw.get("optimizer") == "sgd":
        names.append("SGD with momentum" if MOMENTUM in kinds else "SGD")
    elif MOMENTUM in kinds:
        names.append("Muon")
    if EXP_AVG in kinds and (EXP_AVG_SQ not in kinds or any(rule_of(group) == LION for group in groups)):
        names.append("Lion")
    if EXP_AVG_SQ in kinds:
        names.append("Adam")
    names += [f"state {kind}" for kind in kinds if kind not in _KNOWN]
    fractions = sorted({float(group["offload_fraction"]) for group in groups if "offload_fraction" in group})
    extras = [f"offloaded to CPUs by {fraction:g}" for fraction in fractions]
    extras += ["masters as remainders of bf16 weights"] * (PARAM_REMAINDER in kinds)
    return ", ".join([" and ".join(names) or "masters alone", *extras])
