"""A checkpoint cut into blocks of bounded size, and as sources of which each question is asked once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial

from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.planning.array_location import TransposeCodec
from mcore_ckpt_ext.planning.plan import Source, StoredSlice, slices_in
from mcore_ckpt_ext.planning.source_view import SourceView

# A block of each kind, of each of two threads, stays in a processor's last cache until it has been looked at.
BLOCK_ELEMENTS = 1 << 20


def cached(source: Source) -> SourceView:
    """Return a source that finds the slices, and the shape, of each tensor once."""
    return replace(
        SourceView.of(source),
        stored=lru_cache(maxsize=None)(source.stored),
        logical_tensor=lru_cache(maxsize=None)(source.logical_tensor),
    )


def without_shifts(source: Source) -> SourceView:
    """Return a source whose numbers are read as they are stored, not less what its model space has them less."""
    return replace(
        SourceView.of(source),
        stored=lambda kind, name: _without_shifts(source.stored(kind, name)),
        stored_in=lambda kind, region: _without_shifts(slices_in(source, kind, region)),
    )


def _without_shifts(slices: Sequence[StoredSlice]) -> list[StoredSlice]:
    return [
        replace(one, extent=replace(one.extent, shift=0.0)) if isinstance(one.extent, TransposeCodec) else one
        for one in slices
    ]


def blocks(regions: tuple[Region, ...], numel: int | None = None) -> Iterator[Slice]:
    """Cut the first `numel` elements of some regions, by default all, into slices of bounded size."""
    end = Slice.whole(regions).stop if numel is None else numel
    for start in range(0, end, BLOCK_ELEMENTS):
        yield Slice(regions, start, min(start + BLOCK_ELEMENTS, end))


class Rooms:
    """Memory for blocks, the same for each block of a thread: fresh pages cost more than what is read into them."""

    def __init__(self) -> None:
        self._memory = threading.local()

    def of(self, use: str) -> Callable[[int, torch.dtype], torch.Tensor]:
        """What allocates the memory for one use; what it gave before for that use, in that thread, is overwritten."""
        return partial(self._allocate, use)

    def _allocate(self, use: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        held: dict[str, torch.Tensor] = self._memory.__dict__
        nbytes = numel * dtype.itemsize
        if use not in held or held[use].numel() < nbytes:
            held[use] = torch.empty(nbytes, dtype=torch.uint8)
        return held[use][:nbytes].view(dtype)


@contextmanager
def threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads of which each computes alone: those that torch adds to each spin while they wait for each other."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(max(1, workers), "mcore_ckpt_ext", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        # What one thread sets is the number of all that begin later.
        torch.set_num_threads(before)
