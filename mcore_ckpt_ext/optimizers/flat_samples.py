"""Reads samples of flat buffers and of the weights, by which the packing of a group is recovered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mcore_ckpt_ext.layout.buckets import SAMPLE, BucketKey, OptimizerGroup, Placed
from mcore_ckpt_ext.layout.master_check import MasterCheck
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region, Slice, numel_of
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.optimizers.flat_arrays import FlatArray, GroupKey
from mcore_ckpt_ext.optimizers.stored_scales import check_at_stored_scales
from mcore_ckpt_ext.planning.plan import Source, TargetSlice
from mcore_ckpt_ext.transfer import Transfer, read_slice, target_slice


class FlatSamples:
    """The masters of flat arrays and the weights of a checkpoint, read a few at a time."""

    def __init__(
        self,
        arrays: Mapping[GroupKey, Mapping[tuple[BucketKey, str], FlatArray]],
        weights: Source,
        transfer: Transfer,
        master_check: MasterCheck,
    ) -> None:
        self._arrays = arrays
        self._weights = weights
        self._transfer = transfer
        self._master_check = master_check

    def master_check(self, names: Iterable[str]) -> MasterCheck:
        """Return the master check for the masters of parameters."""
        return check_at_stored_scales(self._weights, names, self._master_check, self._transfer)

    def master(self, group: OptimizerGroup, key: BucketKey, start: int, count: int) -> torch.Tensor:
        """Return `count` fp32 masters from element `start` of a bucket."""
        source, part = self._masters(group, key, start, count)
        first = source.pieces[0] if source.pieces else None
        if first is not None and first.start <= start and start + count <= first.stop:
            return self._transfer.elements(first.extent, first.first + start - first.start, count)
        return read_slice(source, self._transfer, FP32_PARAM, part)

    def _masters(self, group: OptimizerGroup, key: BucketKey, start: int, count: int) -> tuple[FlatArray, Slice]:
        source = self._arrays[group.child, group.index][key, FP32_PARAM].around(start, start + count)
        return source, Slice((Region.whole("masters", (source.numel,)),), start, start + count)

    def weight(self, regions: tuple[Region, ...], count: int) -> torch.Tensor:
        """Return the first `count` elements of a weight's flattened regions, in the stored dtype."""
        whole = Slice.whole(regions[:1])
        if count <= whole.stop:
            for stored in self._weights.stored_slices("weight", regions[0].name):
                if stored.slice == whole:
                    return self._transfer.elements(stored.extent, stored.first, count)
        return read_slice(self._weights, self._transfer, "weight", Slice(regions, 0, count))

    def read_ahead(self, group: OptimizerGroup, placed: Iterable[Placed]) -> Iterator[Placed]:
        """Yield positions in their order; see `Transfer.read_ahead` for the samples of the next ones."""

        def targets(position: Placed) -> Iterator[tuple[Source, TargetSlice]]:
            key, placement = position
            count = min(SAMPLE, numel_of(placement.regions))
            masters, part = self._masters(group, key, placement.start, count)
            yield masters, target_slice(masters, FP32_PARAM, part)
            yield self._weights, target_slice(self._weights, WEIGHT, Slice(placement.regions, 0, count))

        return self._transfer.read_ahead(placed, targets)
