"""Options of the layout search, in a module that the command line's help can import quickly."""

from __future__ import annotations

from enum import Enum

PINS = {
    "tp": "tensor", "pp": "pipeline", "vpp": "virtual_pipeline", "ep": "expert", "etp": "expert_tensor",
    "cp": "context",
}  # fmt: skip
"""The dimensions that a user can fix, and their names in `ParallelLayout`."""


class Recomputation(Enum):
    """The activations that are recomputed in the backward pass (`--recompute-granularity`)."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
