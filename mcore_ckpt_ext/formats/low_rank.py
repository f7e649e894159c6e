"""Weights with adapters merged into them, computed when they are read.

Computed in fp32 and rounded once, to the dtype that is written, as peft 0.21 does by default with fp32 adapters
(`Linear.merge`, `get_delta_weight` in tuners/lora/layer.py, `DoraLinearVariant` in variants.py):

    LoRA   W + (B A) s
    DoRA   m / ||V|| V    with V = W + (B A) s, and the norm of each row
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.families.adapters import Adapted, align_rows
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT, LogicalTensor
from mcore_ckpt_ext.planning.plan import Source, TargetSlice


@dataclass(frozen=True)
class Part:
    """The rows of a weight that one adapter applies to.

    Attributes:
        first: the first row.
        count: the number of rows.
        into: the name of `A`.
        out: the name of `B`, and its first row.
        magnitude: for DoRA, the name of the magnitudes, and the first of them.
        scale: `s`.
    """

    first: int
    count: int
    into: str
    out: tuple[str, int]
    magnitude: tuple[str, int] | None
    scale: float


def parts_of(one: Adapted, scale: float) -> Iterator[tuple[str, Part]]:
    """Yield the rows of Megatron's weights that an adapter applies to, with the names of the weights."""
    columns = [tensor.regions for tensor in (one.base, one.out, one.magnitudes) if tensor]
    into = one.into.regions[0].name
    out = one.out.regions[0].name
    for (first, *places), count in align_rows(*columns):
        magnitude = (one.magnitudes.regions[0].name, places[1]) if one.magnitudes else None
        yield one.base.regions[0].name, Part(first, count, into, (out, places[0]), magnitude, scale)


@dataclass(frozen=True)
class _Band:
    """Rows `[start, stop)` of a weight, `width` columns from `left` on, and their adapter.

    `part`: the adapter merged into them.
    """

    start: int
    stop: int
    left: int
    width: int
    part: Part | None


class Merged:
    """Derives a weight from the base weight and its adapters.

    Args:
        base: the source of the base weight.
        adapters: the source of the adapters' tensors.
        parts: the rows that each adapter applies to.
    """

    def __init__(self, base: Source, adapters: Source, parts: Sequence[Part]) -> None:
        self._base = base
        self._adapters = adapters
        self._parts = sorted(parts, key=lambda part: part.first)

    def inputs(self, wanted: TargetSlice) -> Sequence[tuple[Source, TargetSlice]]:
        """Return the blocks of rows to read: base values, then `A`, `B` and the magnitudes, if any."""
        blocks: list[tuple[Source, TargetSlice]] = []
        for region, start, stop, _ in wanted.slice.pieces():
            tensor = wanted.tensors[region.name]
            for band in self._bands(region, start, stop, tensor.shape[1]):
                rows = band.stop - band.start
                part = band.part
                place = Region(region.name, (band.start, band.left), (rows, band.width))
                blocks.append((self._base, TargetSlice(WEIGHT, Slice.whole((place,)), {region.name: tensor})))
                if part is not None:
                    blocks.append(self._adapter_request(part.into, None, (band.left, band.width)))
                    for name, first in (part.out, *([part.magnitude] if part.magnitude else [])):
                        blocks.append(self._adapter_request(name, (first + band.start - part.first, rows)))
        return blocks

    def values(self, wanted: TargetSlice, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the slice, in fp32."""
        given = iter(inputs)
        result = torch.empty(wanted.slice.numel)
        for region, start, stop, begin in wanted.slice.pieces():
            columns = region.sizes[1]
            bands = []
            for band in self._bands(region, start, stop, wanted.tensors[region.name].shape[1]):
                rows = _merge_band(band, given)
                left = region.offsets[1] - band.left
                bands.append(rows[:, left : left + columns].reshape(-1))
            before = start - start // columns * columns
            result[begin : begin + stop - start] = torch.cat(bands)[before : before + stop - start]
        return result

    def _bands(self, region: Region, start: int, stop: int, columns: int) -> Iterator[_Band]:
        """Yield the rows with elements `[start, stop)` of a region, split where another adapter begins.

        DoRA's norms need whole rows, so its bands have all `columns`.
        """
        top = region.offsets[0]
        width = region.sizes[1]
        row = top + start // width
        last = top - (-stop // width)
        while row < last:
            part = next((part for part in self._parts if part.first <= row < part.first + part.count), None)
            ends = [part.first + part.count] if part else [part.first for part in self._parts if part.first > row]
            end = min([last, *ends])
            whole = part is not None and part.magnitude is not None
            yield _Band(row, end, *((0, columns) if whole else (region.offsets[1], width)), part)
            row = end

    def _adapter_request(
        self, name: str, rows: tuple[int, int] | None, columns: tuple[int, int] | None = None
    ) -> tuple[Source, TargetSlice]:
        """Return a read request for rows, or columns, of an adapter tensor, each given as (first, count)."""
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


def _merge_band(band: _Band, given: Iterator[torch.Tensor]) -> torch.Tensor:
    rows = band.stop - band.start
    part = band.part
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
    """Convert an adapter's numbers to fp32; refuse non-finite ones, which would spread over whole rows."""
    numbers = values.float()
    if not bool(numbers.isfinite().all()):
        raise UnreadableCheckpointError("an adapter holds numbers that are not finite", where=name)
    return numbers
