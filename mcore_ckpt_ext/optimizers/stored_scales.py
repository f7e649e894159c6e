"""The scales that weights of few bits are stored with, and what they say of their masters."""

from __future__ import annotations

from collections.abc import Iterable

from mcore_ckpt_ext.layout.master_check import Proof, smallest_step
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.plan import Source
from mcore_ckpt_ext.transfer import Transfer


def proof_beside(weights: Source, names: Iterable[str], proof: Proof, transfer: Transfer) -> Proof:
    """The proof of the masters of parameters, at the scales that their weights are stored with, if they are.

    Raises:
        UnreadableCheckpointError: a file is damaged.
    """
    if proof.quantised is None:
        return proof
    payloads = [transfer.locate(stored.extent) for name in names for stored in weights.stored(WEIGHT, name)]
    scaled = [(payload.dtype.torch, payload.scaled[0]) for payload in payloads if payload.scaled is not None]
    steps = [smallest_step(dtype, scale) for dtype, scale in scaled]
    return proof.at_step(max(steps, default=0.0))
