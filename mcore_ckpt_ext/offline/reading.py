"""Reading a checkpoint block by block, from several threads, with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch

from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from mcore_ckpt_ext.planning.plan import Source, StoredSlice, WantedSlice, make_plan
from mcore_ckpt_ext.transfer import Transfer

BLOCK_ELEMENTS = 1 << 22
DEFAULT_WORKERS = 4


class Remembering:
    """A source that is asked each question once."""

    def __init__(self, source: Source) -> None:
        self.stored: Callable[[str, str], Sequence[StoredSlice]] = lru_cache(maxsize=None)(source.stored)
        self.logical_tensor: Callable[[str, str], LogicalTensor | None] = lru_cache(maxsize=None)(source.logical_tensor)


class OneCopy:
    """One copy of a part of a tensor as a source of its own."""

    def __init__(self, tensor: LogicalTensor, slices: Sequence[StoredSlice]) -> None:
        self._tensor, self._slices = tensor, slices

    def stored(self, kind: str, name: str) -> Sequence[StoredSlice]:
        """See `planning.plan.Source`."""
        return self._slices

    def logical_tensor(self, kind: str, name: str) -> LogicalTensor | None:
        """See `planning.plan.Source`."""
        return self._tensor


class BlockReader:
    """Reads slices of one checkpoint; the blocks are shared between threads by whoever calls, not in here."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._transfer = Transfer(checkpoint.reader, workers=1)

    def read(self, source: Source, kind: str, wanted: Slice, accept_lost: bool = False) -> torch.Tensor:
        """A slice as a new 1-D tensor of the stored dtype; with `accept_lost`, what nobody holds is zero.

        Raises:
            CheckpointError: a file is damaged, or elements are missing.
        """
        tensors = {region.name: source.logical_tensor(kind, region.name) for region in wanted.regions}
        known = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if len(known) != len(tensors):
            raise KeyError(f"no {kind} {wanted.regions[0].name} in this checkpoint")
        result = torch.empty(wanted.numel, dtype=getattr(torch, next(iter(known.values())).dtype))
        self._transfer.execute(make_plan([WantedSlice(kind, wanted, known)], source, accept_lost), [result])
        return result


def blocks(regions: tuple[Region, ...], numel: int | None = None) -> Iterator[Slice]:
    """Cut the first `numel` elements of some regions, by default all, into slices of bounded size."""
    end = Slice.whole(regions).stop if numel is None else numel
    for start in range(0, end, BLOCK_ELEMENTS):
        yield Slice(regions, start, min(start + BLOCK_ELEMENTS, end))
