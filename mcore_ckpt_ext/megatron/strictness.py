"""The strictness of a load by Megatron's own loop, `--dist-ckpt-strictness`.

It says how keys are treated that only the checkpoint or only the job has.

Sources: `StrictHandling`, megatron/core/dist_checkpointing/validation.py, and `_load_global_dist_base_checkpoint`,
megatron/training/checkpointing.py, core_v0.8.0 to 0.19.2 and the development head of August 2026.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.formats.torch_dist.reader import NAME as TORCH_DIST

_ARGUMENT = "dist_ckpt_strictness"
_RETURNING = ("return_unexpected", "return_all")


def strictness(arguments: Any) -> dict[str, str]:
    """Relax the strictness that requires a request for everything stored: the optimizer is not requested.

    This package has compared the names before.
    """
    return {_ARGUMENT: "raise_unexpected"} if getattr(arguments, _ARGUMENT, None) == "raise_all" else {}


def returns_mismatches(arguments: Any) -> bool:
    """Return whether a load returns a tuple of state and mismatches, where the loop expects the state."""
    is_of_format = getattr(arguments, "ckpt_format", None) == TORCH_DIST
    return is_of_format and getattr(arguments, _ARGUMENT, None) in _RETURNING


def refuse_returning(arguments: Any, folder: Path) -> None:
    """Refuse a strictness with which Megatron fails: 'tuple' object has no attribute 'get'.

    Raises:
        UsageError: always.
    """
    strict = getattr(arguments, _ARGUMENT)
    raise UsageError(
        "Megatron's own loop cannot load with this strictness, whose result has another form",
        found=f"--dist-ckpt-strictness {strict}",
        expected=f"--dist-ckpt-strictness {strict.replace('return', 'log')}",
        where=str(folder),
        hint="what it would return is then in the log",
    )
