"""Divides tensors into blocks of bounded size, and caches the answers of sources."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial

from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.planning.array_location import ReorderedMatrix
from mcore_ckpt_ext.planning.plan import Source, StoredSlice, slices_in
from mcore_ckpt_ext.planning.source_view import SourceView

# With two threads, the blocks of all kinds that are compared fit together into a processor's last-level cache.
BLOCK_ELEMENTS = 1 << 20


def with_cache(source: Source) -> SourceView:
    """Return a source that looks up the slices and the shape of each tensor only once."""
    return replace(
        SourceView.of(source),
        stored_slices=lru_cache(maxsize=None)(source.stored_slices),
        logical_tensor=lru_cache(maxsize=None)(source.logical_tensor),
    )


def strip_shifts(source: Source) -> SourceView:
    """Return a source whose numbers are read as stored, without the shift that model space applies."""
    return replace(
        SourceView.of(source),
        stored_slices=lambda kind, name: _unshift(source.stored_slices(kind, name)),
        stored_slices_in=lambda kind, region: _unshift(slices_in(source, kind, region)),
    )


def _unshift(slices: Sequence[StoredSlice]) -> list[StoredSlice]:
    return [
        stored._replace(extent=replace(stored.extent, shift=0.0))
        if isinstance(stored.extent, ReorderedMatrix)
        else stored
        for stored in slices
    ]


def blocks(regions: tuple[Region, ...], numel: int | None = None) -> Iterator[Slice]:
    """Divide the first `numel` elements of regions, by default all, into slices of bounded size."""
    end = Slice.whole(regions).stop if numel is None else numel
    for start in range(0, end, BLOCK_ELEMENTS):
        yield Slice(regions, start, min(start + BLOCK_ELEMENTS, end))


class BlockMemory:
    """Memory that each thread reuses for its blocks: new pages would cost more than reading into them."""

    def __init__(self) -> None:
        self._memory = threading.local()

    def allocator(self, use: str) -> Callable[[int, torch.dtype], torch.Tensor]:
        """Return an allocator for one use.

        It overwrites what it returned before for that use in the same thread.
        """
        return partial(self._allocate, use)

    def _allocate(self, use: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        held: dict[str, torch.Tensor] = self._memory.__dict__
        nbytes = numel * dtype.itemsize
        if use not in held or held[use].numel() < nbytes:
            held[use] = torch.empty(nbytes, dtype=torch.uint8)
        return held[use][:nbytes].view(dtype)


@contextmanager
def threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads in which torch uses one thread each.

    More would spin while they wait for each other.
    """
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(max(1, workers), "mcore_ckpt_ext", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        # The number that one thread sets applies to all threads that start later.
        torch.set_num_threads(before)
