"""Logical tensors: parameter-shaped global arrays, identified by `(kind, name)`.

Names are Megatron's sharded keys with the global layer and expert index inserted (`names.py`), so that a name never
depends on how a format stacks layers or experts into one array.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = "weight"
FP32_PARAM = "fp32_param"
PARAM_REMAINDER = "param_remainder"
"""What bf16 weights lack of fp32 masters, as int16: with the weight it is the master (see `optimizers.remainders`)."""
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
KINDS = (WEIGHT, FP32_PARAM, EXP_AVG, EXP_AVG_SQ)
"""The kinds of a model that Adam trains."""


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A global array of model space: its name, its shape in elements, its torch dtype by name (`bfloat16`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
