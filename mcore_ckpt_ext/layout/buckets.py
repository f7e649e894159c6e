"""The flat buffers of one optimizer group, as stored, and the positions of its parameters in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mcore_ckpt_ext.layout.grad_buffer import PARAMETER_ALIGNMENT
from mcore_ckpt_ext.layout.local_model import ModelRank
from mcore_ckpt_ext.layout.master_check import MasterCheck
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region, numel_of


@dataclass(frozen=True, slots=True, order=True)
class BucketKey:
    """The identity of a bucket in a group: its buffer, dtypes as Megatron prints them, and number.

    `buffer` is the number of a gradient buffer; `dtypes` are that buffer's.
    """

    buffer: int
    dtypes: str
    bucket: int

    def __str__(self) -> str:
        return f"gbuf_idx_{self.buffer}.dtype_{self.dtypes}.bucket_idx_{self.bucket}"


@dataclass(frozen=True, slots=True)
class StoredBucket:
    """One stored flat array: a bucket or a whole buffer.

    Attributes:
        numel_unpadded: elements without the padding at bucket ends.
        borders: where stored chunks begin or end, ascending; None if the format stores the array in one piece.
    """

    numel_unpadded: int
    borders: tuple[int, ...] | None


@dataclass(frozen=True)
class OptimizerGroup:
    """The buffers that the data-parallel ranks of one place in the model share.

    Attributes:
        child: the number of the chained optimizer.
        index: Megatron's `dp_group_idx`.
        rank: the place in the model.
        stages: the model chunks (virtual stages) of this optimizer.
        buckets: the stored arrays.
        joined: whether the format stores a buffer as one array of concatenated buckets without the padding at their
            ends; it is then filed under bucket 0.
        alignment: parameters begin at multiples of it.
    """

    child: int
    index: int
    rank: ModelRank
    stages: range
    buckets: Mapping[BucketKey, StoredBucket]
    joined: bool = False
    alignment: int = PARAMETER_ALIGNMENT

    def __str__(self) -> str:
        return f"optimizer {self.child}, dp_group_idx_{self.index} ({self.rank})"


class Placement(NamedTuple):
    """A local parameter at elements `[start, start + numel)` of a bucket."""

    name: str
    regions: tuple[Region, ...]
    start: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + numel_of(self.regions)


Packing = Mapping[BucketKey, Sequence[Placement]]
Placed = tuple[BucketKey, Placement]
"""A bucket and a parameter in it."""


SAMPLE = 64
"""Number of a parameter's first elements that are compared, to verify proposed packings and to search for one."""


class SampleReader(Protocol):
    """Reads samples of a checkpoint."""

    def master_check(self, names: Iterable[str]) -> MasterCheck:
        """Return the master check for the masters of parameters."""

    def master(self, group: OptimizerGroup, key: BucketKey, start: int, count: int) -> torch.Tensor:
        """Return `count` fp32 masters from element `start` of a bucket."""

    def weight(self, regions: tuple[Region, ...], count: int) -> torch.Tensor:
        """Return the first `count` elements of a weight's flattened regions, in the stored dtype."""

    def read_ahead(self, group: OptimizerGroup, placed: Iterable[Placed]) -> Iterator[Placed]:
        """Yield positions in their order; see `FolderReader.read_ahead` for the samples of the next ones."""


def fit_problem(packing: Packing, group: OptimizerGroup) -> str | None:
    """Return why a proposed packing contradicts a stored group's sizes and chunk borders.

    Every border of a parameter within a bucket is a border of stored chunks, because the saver writes one chunk for
    each parameter and rank (`sharded_param_state_dp_reshardable`, distrib_optimizer.py, core_v0.15.0 to 0.19.2).

    Returns:
        None if it does not.
    """
    if set(packing) != set(group.buckets):
        return f"buckets {_keys(packing)} proposed, {_keys(group.buckets)} stored"
    for key, stored in group.buckets.items():
        borders = None if stored.borders is None else frozenset(stored.borders)
        end = 0
        for placement in packing[key]:
            for border in (placement.start, placement.stop):
                if borders is not None and border not in borders and border != stored.numel_unpadded:
                    return f"{placement.name} would begin or end at {border} of {key}, where no stored chunk does"
            if placement.start < end or placement.stop > stored.numel_unpadded:
                return f"{placement.name} would lie at {placement.start}:{placement.stop} of {key}, outside its bounds"
            end = placement.stop
        if stored.numel_unpadded - end >= PARAMETER_ALIGNMENT:
            return f"nothing would fill {key} from {end} to {stored.numel_unpadded}"
    return None


def _keys(buckets: Mapping[BucketKey, object]) -> str:
    return ", ".join(map(str, sorted(buckets))) or "none"
