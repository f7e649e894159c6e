"""Search by content: finds the packing of a model that follows no known rule, from the stored bytes.

Chunk borders limit where parameters can begin and how long they can be; the weights identify the parameter. Equal
constants (norm weights that are still all ones) are distinguished by layer and by the order in other layers. If that
does not decide, the search fails. Swapped masters would look like an unknown order, but the moments would then be
assigned wrongly. Therefore only a regular packing is accepted: see `irregularity`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from mcore_ckpt_ext.errors import PackingError
from mcore_ckpt_ext.layout.buckets import SAMPLE, BucketKey, OptimizerGroup, Packing, Placement, SampleReader
from mcore_ckpt_ext.layout.grad_buffer import align
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.names import Layer, split_layer
from mcore_ckpt_ext.model_space.slices import Region, numel_of


@dataclass(frozen=True)
class _Spot:
    """A position in a bucket where a parameter begins, and the parameters whose weights match there."""

    key: BucketKey
    start: int
    fitting: dict[str, tuple[Region, ...]]


def search_by_content(
    group: OptimizerGroup,
    candidates: Iterable[tuple[str, tuple[Region, ...]]],
    data_parallel_borders: dict[BucketKey, frozenset[int]],
    reader: SampleReader,
) -> Packing:
    """Locate every parameter of a group.

    Args:
        group: the stored buffers.
        candidates: all parameters that this tensor-parallel rank can have.
        data_parallel_borders: chunk borders that data-parallel sharding alone explains, by bucket.
        reader: reads samples.

    Raises:
        PackingError: no parameter, or more than one, matches at some position.
    """
    search = _Search(group, reader, candidates)
    spots = [
        spot
        for key, stored in sorted(group.buckets.items())
        for spot in (
            search.spots_between_borders(key, stored.borders, data_parallel_borders.get(key, frozenset()))
            if stored.borders is not None
            else search.spots_by_content(key, stored.numel_unpadded)
        )
    ]
    names = _Assignment(group, spots).solve()
    packing: dict[BucketKey, list[Placement]] = {key: [] for key in group.buckets}
    for spot, name in zip(spots, names, strict=True):
        packing[spot.key].append(Placement(name, spot.fitting[name], spot.start))
    return packing


class _Search:
    """Finds the parameters whose first weights match the masters at a position of a bucket."""

    def __init__(
        self, group: OptimizerGroup, reader: SampleReader, candidates: Iterable[tuple[str, tuple[Region, ...]]]
    ) -> None:
        self._group = group
        self._reader = reader
        self._by_numel: dict[int, list[tuple[str, tuple[Region, ...], torch.Tensor]]] = {}
        for name, regions in candidates:
            numel = numel_of(regions)
            weight = reader.weight(regions, min(numel, SAMPLE))
            self._by_numel.setdefault(numel, []).append((name, regions, weight))

    def spots_between_borders(
        self, key: BucketKey, borders: Sequence[int], data_parallel_borders: frozenset[int]
    ) -> Iterable[_Spot]:
        """Yield spots of an array with chunk borders, which limit where parameters begin and end."""
        position = 0
        while position < len(borders) - 1:
            start = borders[position]
            if start % self._group.alignment:
                position += 1
                continue
            spot, position = self._best_match(key, borders, position, data_parallel_borders)
            if not spot.fitting:
                raise PackingError(
                    "the search by content found no parameter whose weights match the masters at a place",
                    where=f"{self._group}, {key}, element {start}",
                    hint="the checkpoint is damaged, its weights were edited, or they belong to another iteration",
                )
            yield spot

    def spots_by_content(self, key: BucketKey, numel: int) -> Iterable[_Spot]:
        """Yield spots of an array without chunk borders; at each place only one length may match."""
        start = 0
        while start < numel:
            if start % self._group.alignment:
                start = align(start, self._group.alignment)
                continue
            sample = self._reader.master(self._group, key, start, min(numel - start, SAMPLE))
            fitting = {
                length: self._parameters_matching(sample, length)
                for length in self._by_numel
                if length <= numel - start
            }
            lengths = [length for length, names in fitting.items() if names]
            if len(lengths) != 1:
                raise PackingError(
                    "the search by content cannot determine which parameter is at a place",
                    found=f"parameters of {lengths or 'no'} elements fit",
                    where=f"{self._group}, {key}, element {start}",
                )
            yield _Spot(key, start, fitting[lengths[0]])
            start += lengths[0]

    def _best_match(
        self, key: BucketKey, borders: Sequence[int], position: int, data_parallel_borders: frozenset[int]
    ) -> tuple[_Spot, int]:
        """Return the parameters that match at one border, and the number of the border at their end.

        Their length is the only one that leaves no unexplained border inside.
        """
        start = borders[position]
        for after in range(position + 1, len(borders)):
            fitting = {}
            numel = borders[after] - start
            if numel in self._by_numel:
                fitting = self._parameters_matching(
                    self._reader.master(self._group, key, start, min(numel, SAMPLE)), numel
                )
            if fitting or borders[after] not in data_parallel_borders:
                return _Spot(key, start, fitting), after
        return _Spot(key, start, {}), len(borders)

    def _parameters_matching(self, masters: torch.Tensor, numel: int) -> dict[str, tuple[Region, ...]]:
        """Return the parameters of `numel` elements whose first weights are these masters when rounded."""
        return {
            name: regions
            for name, regions, weight in self._by_numel[numel]
            if torch.equal(masters[: len(weight)].to(weight.dtype), weight)
        }


def irregularity(packings: Iterable[Packing]) -> str | None:
    """Return why Megatron's modules cannot have registered a set of packings, one per group.

    A chunk registers its layers one after the other, and layers with equal parts register them in the same order. A
    buffer has the reverse order.

    Returns:
        None if they can.
    """
    orders: dict[frozenset[str], tuple[str, ...]] = {}
    for packing in packings:
        buffers: dict[tuple[int, str], list[str]] = {}
        for key in sorted(packing):
            buffers.setdefault((key.buffer, key.dtypes), []).extend(placement.name for placement in packing[key])
        for names in buffers.values():
            seen: set[str] = set()
            blocks = [
                (layer, tuple(suffix for _, suffix in block))
                for layer, block in groupby(map(split_layer, names), key=lambda part: part[0])
                if layer is not None
            ]
            for block, block_layers in groupby((layer for layer, _ in blocks), key=lambda layer: layer.block):
                layers = [layer.number for layer in block_layers]
                if block in seen or layers != sorted(set(layers), reverse=True):
                    return f"the layers of {block} would lie in the order {layers}"
                seen.add(block)
            for layer, suffixes in blocks:
                usual = orders.setdefault(frozenset(suffixes), suffixes)
                if usual != suffixes:
                    return f"layer {layer.number} would lie as {suffixes}, another one as {usual}"
    return None


class _Assignment:
    """Assigns a parameter to each spot.

    First where only one matches, then by layer, then by the order of other layers.
    """

    def __init__(self, group: OptimizerGroup, spots: Sequence[_Spot]) -> None:
        self._group = group
        self._spots = spots
        self._open = [set(spot.fitting) for spot in spots]

    def solve(self) -> list[str]:
        changed = True
        while changed:
            changed = self._drop_used() or self._keep_layer() or self._follow_pattern()
        for spot, names in zip(self._spots, self._open, strict=True):
            if len(names) != 1:
                raise PackingError(
                    "the search by content cannot distinguish parameters with the same values",
                    found=sorted(names)[:4] or "none left",
                    where=f"{self._group}, {spot.key}, element {spot.start}",
                    hint="resume once under the layout that wrote the checkpoint and save with this package installed",
                )
        return [next(iter(names)) for names in self._open]

    def _narrow(self, index: int, keep: set[str]) -> bool:
        kept = self._open[index] & keep
        if not kept or kept == self._open[index]:
            return False
        self._open[index] = kept
        return True

    def _drop_used(self) -> bool:
        used = {next(iter(names)) for names in self._open if len(names) == 1}
        open_spots = [i for i, names in enumerate(self._open) if len(names) > 1]
        narrowed = [self._narrow(i, self._open[i] - used) for i in open_spots]
        return any(narrowed)

    def _keep_layer(self) -> bool:
        """Narrow by layer: buffers contain whole layers, so two places of a layer enclose only that layer."""
        changed = False
        for index, names in enumerate(self._open):
            if len(names) > 1:
                before = self._known_layer(index, -1)
                after = self._known_layer(index, +1)
                if before is not None and before == after:
                    changed |= self._narrow(index, {name for name in names if split_layer(name)[0] == before})
                elif before is not None and after is not None:
                    changed |= self._narrow(index, {n for n in names if split_layer(n)[0] in (before, after)})
        return changed

    def _known_layer(self, index: int, step: int) -> Layer | None:
        index += step
        while 0 <= index < len(self._open) and self._spots[index].key.buffer == self._spots[index - step].key.buffer:
            if len(self._open[index]) == 1:
                return split_layer(next(iter(self._open[index])))[0]
            index += step
        return None

    def _follow_pattern(self) -> bool:
        """Narrow by order: successors of a parameter in assigned layers apply to the other layers."""
        follows: dict[str, set[str]] = {}
        for first, second in zip(self._open, self._open[1:], strict=False):
            if len(first) == len(second) == 1:
                follows.setdefault(_suffix(first), set()).add(_suffix(second))
        changed = False
        for index in range(1, len(self._open)):
            previous = self._open[index - 1]
            names = self._open[index]
            if len(previous) == 1 and len(names) > 1:
                expected = follows.get(_suffix(previous), set())
                layer = split_layer(next(iter(previous)))[0]
                keep = {n for n in names if split_layer(n)[1] in expected and split_layer(n)[0] == layer}
                changed |= self._narrow(index, keep)
        return changed


def _suffix(names: set[str]) -> str:
    return split_layer(next(iter(names)))[1]
