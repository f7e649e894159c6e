"""One tensor of an open checkpoint, which is read on request and verified as it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mcore_ckpt_ext.errors import reraise_as_unreadable
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT, LogicalTensor
from mcore_ckpt_ext.optimizers.stored_scales import ProvableSource, proof_at_stored_scales
from mcore_ckpt_ext.planning.plan import Source
from mcore_ckpt_ext.transfer import read_slice


class ProvenSource(ProvableSource, Source, Protocol):
    """The part of a checkpoint's interface that a handle needs."""

    def masters_are_derived(self, name: str) -> bool:
        """Return whether a parameter's masters derive from its weights, so that nothing needs verifying."""


@dataclass(frozen=True)
class TensorHandle:
    """One global tensor of a checkpoint, read lazily."""

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
        """Read the tensor, or the given region of it; optimizer state is verified as it is read.

        Raises:
            ProofError: the masters of that region do not round to its weights.
            CheckpointError: the checkpoint is damaged or incomplete, or its packing cannot be recovered.
        """
        with reraise_as_unreadable(self.checkpoint.folder):
            return self._proven(region or Region.whole(self.logical.name, self.logical.shape))

    def _proven(self, wanted: Region) -> torch.Tensor:
        values = self._read(self.kind, wanted)
        if self.kind != WEIGHT and not self.checkpoint.masters_are_derived(wanted.name):
            masters = values if self.kind == FP32_PARAM else self._read(FP32_PARAM, wanted)
            own = self.checkpoint
            proof_at_stored_scales(own, [wanted.name], own.proof, own.transfer).check(
                masters,
                self._read(WEIGHT, wanted),
                lambda position: f"{wanted.name}, element {position} of {wanted}, {self.checkpoint.folder}",
            )
        return values.view(wanted.sizes)

    def _read(self, kind: str, region: Region) -> torch.Tensor:
        return read_slice(self.checkpoint, self.checkpoint.transfer, kind, Slice.whole((region,)))
