"""Weights with adapters merged into them, computed where they are asked for.

In fp32, and rounded once, into the dtype that is written; as peft 0.21 does it (`Linear.merge`, `get_delta_weight` of
tuners/lora/layer.py, `DoraLinearVariant` of variants.py), whose adapters are in fp32 unless one asks otherwise:

    LoRA   W + (B A) s
    DoRA   m / ||V|| V    with V = W + (B A) s, and the norm of each row
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.families.adapters import Adapted, aligned
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT, LogicalTensor
from mcore_ckpt_ext.planning.plan import Source, TargetSlice


@dataclass(frozen=True)
class Part:
    """Rows of a weight that one adapter is for.

    Attributes:
        first: the first of them.
        count: how many.
        into: the name of `A`.
        out: the name of `B`, and the first of its rows.
        magnitude: of DoRA, the name of the magnitudes, and the first of them.
        scale: `s`.
    """

    first: int
    count: int
    into: str
    out: tuple[str, int]
    magnitude: tuple[str, int] | None
    scale: float


def parts_of(one: Adapted, scale: float) -> Iterator[tuple[str, Part]]:
    """The rows of Megatron's weights that an adapter is for, with the weights' names."""
    columns = [tensor.regions for tensor in (one.base, one.out, one.magnitudes) if tensor]
    into, out = one.into.regions[0].name, one.out.regions[0].name
    for (first, *places), count in aligned(*columns):
        magnitude = (one.magnitudes.regions[0].name, places[1]) if one.magnitudes else None
        yield one.base.regions[0].name, Part(first, count, into, (out, places[0]), magnitude, scale)


@dataclass(frozen=True)
class _Band:
    """Rows `[start, stop)` of a weight, `width` columns from `left` on; `part`: what is merged into them."""

    start: int
    stop: int
    left: int
    width: int
    part: Part | None


class Merged:
    """How a weight follows from that of the base, and from its adapters.

    `base`, `adapters`: where both are read from. `parts`: by their first rows.
    """

    def __init__(self, base: Source, adapters: Source, parts: Sequence[Part]) -> None:
        self._base, self._adapters = base, adapters
        self._parts = sorted(parts, key=lambda part: part.first)

    def inputs(self, wanted: TargetSlice) -> Sequence[tuple[Source, TargetSlice]]:
        """Blocks of rows: the values of the base, then those of `A`, `B` and the magnitudes, if any."""
        found: list[tuple[Source, TargetSlice]] = []
        for region, start, stop, _ in wanted.slice.pieces():
            tensor = wanted.tensors[region.name]
            for band in self._bands(region, start, stop, tensor.shape[1]):
                rows, part = band.stop - band.start, band.part
                place = Region(region.name, (band.start, band.left), (rows, band.width))
                found.append((self._base, TargetSlice(WEIGHT, Slice.whole((place,)), {region.name: tensor})))
                if part is not None:
                    found.append(self._of_adapter(part.into, None, (band.left, band.width)))
                    for name, first in (part.out, *([part.magnitude] if part.magnitude else [])):
                        found.append(self._of_adapter(name, (first + band.start - part.first, rows)))
        return found

    def values(self, wanted: TargetSlice, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The slice, in fp32."""
        given, result = iter(inputs), torch.empty(wanted.slice.numel)
        for region, start, stop, begin in wanted.slice.pieces():
            columns, bands = region.sizes[1], []
            for band in self._bands(region, start, stop, wanted.tensors[region.name].shape[1]):
                rows = _merged(band, given)
                left = region.offsets[1] - band.left
                bands.append(rows[:, left : left + columns].reshape(-1))
            before = start - start // columns * columns
            result[begin : begin + stop - start] = torch.cat(bands)[before : before + stop - start]
        return result

    def _bands(self, region: Region, start: int, stop: int, columns: int) -> Iterator[_Band]:
        """The rows that hold elements `[start, stop)` of a region, cut where another adapter begins.

        Norms are of whole rows, of all `columns`.
        """
        top, width = region.offsets[0], region.sizes[1]
        row, last = top + start // width, top - (-stop // width)
        while row < last:
            part = next((part for part in self._parts if part.first <= row < part.first + part.count), None)
            ends = [part.first + part.count] if part else [part.first for part in self._parts if part.first > row]
            end = min([last, *ends])
            whole = part is not None and part.magnitude is not None
            yield _Band(row, end, *((0, columns) if whole else (region.offsets[1], width)), part)
            row = end

    def _of_adapter(
        self, name: str, rows: tuple[int, int] | None, columns: tuple[int, int] | None = None
    ) -> tuple[Source, TargetSlice]:
        """Rows, or columns, of one of the adapters' tensors: (first, count)."""
        tensor = self._tensor(name)
        spans = [(0, size) for size in tensor.shape]
        spans[0] = rows or spans[0]
        spans[-1] = columns or spans[-1]
        region = Region(name, tuple(first for first, _ in spans), tuple(count for _, count in spans))
        return self._adapters, TargetSlice(WEIGHT, Slice.whole((region,)), {name: tensor})

    def _tensor(self, name: str) -> LogicalTensor:
        tensor = self._adapters.logical_tensor(WEIGHT, name)
        if tensor is None:
            raise UnreadableCheckpointError("an adapter lacks a tensor", expected=name)
        return tensor


def _merged(band: _Band, given: Iterator[torch.Tensor]) -> torch.Tensor:
    rows, part = band.stop - band.start, band.part
    weight = next(given).view(rows, band.width).float()
    if part is None:
        return weight
    into = _finite(part.into, next(given)).view(-1, band.width)
    out = _finite(part.out[0], next(given)).view(rows, -1)
    weight = weight + (out @ into) * part.scale
    if part.magnitude is None:
        return weight
    norms: torch.Tensor = torch.linalg.norm(weight, dim=1)
    return (_finite(part.magnitude[0], next(given)) / norms).view(-1, 1) * weight


def _finite(name: str, values: torch.Tensor) -> torch.Tensor:
    """In fp32, an adapter's numbers: what is not finite would spread over whole rows of the model."""
    numbers = values.float()
    if not bool(numbers.isfinite().all()):
        raise UnreadableCheckpointError("an adapter holds numbers that are not finite", where=name)
    return numbers
