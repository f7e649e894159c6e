"""Detects values that overflow when they are rounded to float16, whose maximum is 65504."""

from __future__ import annotations

from collections.abc import Callable

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.planning.write_plan import WriteItem


def check_fits(placed: WriteItem, rounded: torch.Tensor, read: Callable[[WriteItem, torch.Tensor], None]) -> None:
    """Refuse finite values that became infinite.

    Args:
        placed: the slice that was read.
        rounded: its elements, in float16.
        read: reads it again, into memory of another dtype.

    Raises:
        UnsupportedCheckpointError: a value does not fit.
    """
    if all(tensor.dtype == "float16" for tensor in placed.wanted.tensors.values()) or rounded.isfinite().all():
        return
    exact = torch.empty(rounded.numel())
    read(placed, exact)
    if (lost := exact.isfinite() & ~rounded.isfinite()).any():
        raise UnsupportedCheckpointError(
            "a value is too large for float16 and would become infinite",
            found=f"{exact[lost].abs().max().item():g}", expected=f"at most {torch.finfo(torch.float16).max:g}",
            where=placed.wanted.slice.regions[0].name, hint="choose another dtype: --dtype bfloat16",
        )  # fmt: skip
