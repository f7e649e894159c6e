"""One tensor of an open checkpoint, which is read on request and verified as it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from mcore_ckpt_ext.errors import UnknownNameError, UsageError, format_value, reraise_as_unreadable
from mcore_ckpt_ext.formats.parts import Files, Job, StoredOptimizer
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT, LogicalTensor
from mcore_ckpt_ext.optimizers.stored_scales import check_at_stored_scales
from mcore_ckpt_ext.planning.plan import Source
from mcore_ckpt_ext.transfer import read_slice


class TensorSource(Source, Protocol):
    """The part of a checkpoint's interface that a handle needs."""

    @property
    def files(self) -> Files:
        """The stored bytes."""

    @property
    def job(self) -> Job:
        """The job that wrote the checkpoint."""

    @property
    def optimizer(self) -> StoredOptimizer:
        """The optimizer."""

    def names(self, kind: str) -> Sequence[str]:
        """Return the names of all tensors of a kind."""


@dataclass(frozen=True)
class TensorHandle:
    """One global tensor of a checkpoint, read lazily."""

    checkpoint: TensorSource
    kind: str
    logical: LogicalTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.logical.shape

    @property
    def dtype(self) -> torch.dtype:
        """Stored dtype."""
        stored_dtype: torch.dtype = getattr(torch, self.logical.dtype)
        return stored_dtype

    def __repr__(self) -> str:
        return f"<TensorHandle {self.kind} {self.logical.name}, {self.logical.dtype}, shape {self.shape}>"

    def read(self, region: Region | slice | tuple[slice, ...] | None = None) -> torch.Tensor:
        """Read the tensor, or a region of it; optimizer state is verified as it is read.

        Args:
            region: offsets and sizes, or slices of the first axes as in `tensor[2:4, :8]`; by default all elements.

        Raises:
            UsageError: the region is not one of this tensor.
            ProofError: the masters of that region do not round to its weights.
            CheckpointError: the checkpoint is damaged or incomplete, or its packing cannot be recovered.
        """
        requested = self._region(() if region is None else region)
        with reraise_as_unreadable(self.checkpoint.files.folder):
            return self._proven(requested)

    def _region(self, selected: object) -> Region:
        """Return what a caller selects as a region of this tensor."""
        name = self.logical.name
        shape = self.shape
        if isinstance(selected, Region):
            region = selected
        else:
            slices = selected if isinstance(selected, tuple) else (selected,)
            if len(slices) > len(shape) or not all(map(_is_contiguous, slices)):
                raise self._no_region(selected)
            whole = (slice(None),) * (len(shape) - len(slices))
            bounds = [axis_slice.indices(size)[:2] for axis_slice, size in zip((*slices, *whole), shape, strict=True)]
            sizes = tuple(max(stop - start, 0) for start, stop in bounds)
            region = Region(name, tuple(start for start, _ in bounds), sizes)
        if region.name != name or len(region.offsets) != len(shape) or len(region.sizes) != len(shape):
            raise self._no_region(selected)
        axes = zip(region.offsets, region.sizes, shape, strict=True)
        if not all(offset >= 0 and count >= 0 and offset + count <= size for offset, count, size in axes):
            raise self._no_region(selected)
        return region

    def _no_region(self, selected: object) -> UsageError:
        return UsageError(
            "this is not a region of the tensor",
            found=format_value(selected),
            expected=f"slices with step 1, or Region({self.logical.name!r}, offsets, sizes), within {self.shape}",
            where=f"{self.kind} {self.logical.name}",
        )

    def _proven(self, region: Region) -> torch.Tensor:
        values = self._read(self.kind, region)
        if self.kind != WEIGHT and not self.checkpoint.optimizer.masters_are_derived(region.name):
            masters = values if self.kind == FP32_PARAM else self._read(FP32_PARAM, region)
            checkpoint = self.checkpoint
            check_at_stored_scales(
                checkpoint, [region.name], checkpoint.job.master_check, checkpoint.files.transfer
            ).verify(
                masters,
                self._read(WEIGHT, region),
                lambda position: f"{region.name}, element {position} of {region}, {self.checkpoint.files.folder}",
            )
        return values.view(region.sizes)

    def _read(self, kind: str, region: Region) -> torch.Tensor:
        return read_slice(self.checkpoint, self.checkpoint.files.transfer, kind, Slice.whole((region,)))


def handle_of(checkpoint: TensorSource, kind: str, name: str) -> TensorHandle:
    """Return the handle of one tensor.

    Raises:
        TypeError: kind or name is no text.
        UnknownNameError: the checkpoint does not contain it.
    """
    if not isinstance(kind, str) or not isinstance(name, str):
        raise TypeError(f"tensor() takes a kind and a name, both str; not {kind!r}, {name!r}")
    logical = checkpoint.logical_tensor(kind, name)
    if logical is None:
        similar = " or ".join(get_close_matches(name, checkpoint.names(kind))) or None
        raise UnknownNameError(
            "the checkpoint has no such tensor",
            found=f"{kind} {name}",
            expected=similar,
            where=str(checkpoint.files.folder),
        )
    return TensorHandle(checkpoint, kind, logical)


def _is_contiguous(selected: object) -> bool:
    """Return whether a caller selects elements of an axis by a slice with step 1."""
    if not isinstance(selected, slice) or selected.step not in (None, 1):
        return False
    return all(bound is None or hasattr(bound, "__index__") for bound in (selected.start, selected.stop))
