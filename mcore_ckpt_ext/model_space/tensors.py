"""Logical tensors: global arrays in the shape of parameters, identified by `(kind, name)`.

Names are Megatron's sharded keys with the global layer and expert index inserted (`names.py`), so that they do not
depend on how a format stacks layers or experts into one array.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WEIGHT = "weight"
FP32_PARAM = "fp32_param"
PARAM_REMAINDER = "param_remainder"
"""The int16 difference between an fp32 master and its bf16 weight (see `optimizers.remainders`)."""
STALE_MASTER = "stale_master"
"""A stored copy of an fp32 weight that no step updates (see `master_check.has_fused_masters`)."""
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
KINDS = (WEIGHT, FP32_PARAM, EXP_AVG, EXP_AVG_SQ)
"""The kinds of a model that Adam trains."""

_INTEGERS = re.compile(r"bool|u?int\d+")
# Moments of fp8 that FusedAdam keeps as bytes (transformer_engine/pytorch/optimizers/fused_adam.py, 2.1 to 2.20.2).
_BYTES = ("uint8", "int8")


def contradicts_kind(kind: str, dtype: str) -> bool:
    """Return whether no trained tensor of a kind has a dtype; the fp32 master is checked elsewhere."""
    if kind == PARAM_REMAINDER:
        return dtype != "int16"
    if kind in (EXP_AVG, EXP_AVG_SQ) and dtype in _BYTES:
        return False
    return kind in (*KINDS, PARAM_REMAINDER) and _INTEGERS.fullmatch(dtype) is not None


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A global array of model space: its name, shape in elements, and torch dtype by name (`bfloat16`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
