"""One tensor of an open checkpoint: it is read when it is asked for, and proven where it is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mcore_ckpt_ext.errors import reraise_as_unreadable
from mcore_ckpt_ext.layout.master_check import Proof
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT, LogicalTensor
from mcore_ckpt_ext.optimizers.stored_scales import proof_beside
from mcore_ckpt_ext.planning.plan import Source
from mcore_ckpt_ext.transfer import Transfer, read_slice


class ProvenSource(Source, Protocol):
    """What a handle needs from its checkpoint."""

    @property
    def folder(self) -> Path:
        """The iteration folder."""

    @property
    def transfer(self) -> Transfer:
        """Reads the checkpoint's files."""

    @property
    def proof(self) -> Proof:
        """How the masters that the checkpoint stores are proven."""

    def masters_are_derived(self, name: str) -> bool:
        """Whether a parameter's masters are derived from its own weights, which leaves nothing to prove."""


@dataclass(frozen=True)
class TensorHandle:
    """One global tensor of a checkpoint; reading is lazy."""

    checkpoint: ProvenSource
    kind: str
    logical: LogicalTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.logical.shape

    @property
    def dtype(self) -> torch.dtype:
        """Stored dtype."""
        found: torch.dtype = getattr(torch, self.logical.dtype)
        return found

    def read(self, region: Region | None = None) -> torch.Tensor:
        """The tensor, or the part of it that `region` names; optimizer state is proven where it is read.

        Raises:
            ProofError: the masters of that part do not round to its weights.
            CheckpointError: it is damaged or incomplete, or its packing cannot be recovered.
        """
        with reraise_as_unreadable(self.checkpoint.folder):
            return self._proven(region or Region.whole(self.logical.name, self.logical.shape))

    def _proven(self, wanted: Region) -> torch.Tensor:
        values = self._read(self.kind, wanted)
        if self.kind != WEIGHT and not self.checkpoint.masters_are_derived(wanted.name):
            masters = values if self.kind == FP32_PARAM else self._read(FP32_PARAM, wanted)
            own = self.checkpoint
            proof_beside(own, [wanted.name], own.proof, own.transfer).check(
                masters,
                self._read(WEIGHT, wanted),
                lambda position: f"{wanted.name}, element {position} of {wanted}, {self.checkpoint.folder}",
            )
        return values.view(wanted.sizes)

    def _read(self, kind: str, region: Region) -> torch.Tensor:
        return read_slice(self.checkpoint, self.checkpoint.transfer, kind, Slice.whole((region,)))
