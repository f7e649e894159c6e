"""The stored scales of quantized weights, and the master check that follows from them."""

from __future__ import annotations

from collections.abc import Iterable

from mcore_ckpt_ext.layout.master_check import MasterCheck, smallest_step
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.plan import Source
from mcore_ckpt_ext.transfer import Transfer


def check_at_stored_scales(
    weights: Source, names: Iterable[str], master_check: MasterCheck, transfer: Transfer
) -> MasterCheck:
    """Return the check for masters of parameters, adjusted to their weights' stored scales, if any.

    Raises:
        UnreadableCheckpointError: a file is damaged.
    """
    if master_check.quantized is None:
        return master_check
    payloads = [transfer.locate(stored.extent) for name in names for stored in weights.stored_slices(WEIGHT, name)]
    scaled = [(payload.dtype.torch, payload.scaled[0]) for payload in payloads if payload.scaled is not None]
    steps = [smallest_step(dtype, scale) for dtype, scale in scaled]
    return master_check.with_step(max(steps, default=0.0))
