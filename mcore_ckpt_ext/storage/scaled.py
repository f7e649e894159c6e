"""From codes and scales to numbers.

The arithmetic is that of transformers on a CPU, bit by bit: `Fp8Dequantize` (integrations/finegrained_fp8.py, 5.23)
multiplies in float32 and rounds once; `convert_moe_packed_tensors` (integrations/mxfp4.py) scales by powers of two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mcore_ckpt_ext.planning.extents import Scaled

# E2M1: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0).
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_EXPONENT_BIAS = 127
# Elements at once: what they are computed in takes a multiple of their own size.
_AT_ONCE = 1 << 19

ReadCodes = Callable[[int, int], torch.Tensor]
"""Reads codes, or scales: the first one, and how many."""


def decode(extent: Scaled, first: int, count: int, codes: ReadCodes, scales: ReadCodes) -> torch.Tensor:
    """Numbers of a quantised matrix, in the order of its rows.

    Args:
        extent: the matrix.
        first: the first element.
        count: how many.
        codes: reads its codes.
        scales: reads its scales.
    """
    found = torch.empty(count, dtype=getattr(torch, extent.dtype))
    # Whole rows where there are several, so that a scale is looked up once for its block of each.
    step = max(1, _AT_ONCE // extent.columns) * extent.columns
    start = 0
    while start < count:
        at = first + start
        stop = min(count, start + step - at % extent.columns)
        found[start:stop] = _decoded(extent, at, stop - start, codes, scales)
        start = stop
    return found


def _decoded(extent: Scaled, first: int, count: int, codes: ReadCodes, scales: ReadCodes) -> torch.Tensor:
    height, width = extent.block
    top, bottom = first // extent.columns, -(-(first + count) // extent.columns)
    across = -(-extent.columns // width)
    bands = range(top // height, -(-bottom // height))
    grid = _values(extent, scales(bands.start * across, len(bands) * across)).view(-1, across)
    by_column = grid.repeat_interleave(width, dim=1)[:, : extent.columns]
    by_row = by_column[torch.arange(top, bottom) // height - bands.start]
    whole = torch.zeros((bottom - top) * extent.columns)
    inside = slice(first - top * extent.columns, first - top * extent.columns + count)
    whole[inside] = _unpacked(first, count, codes) if extent.packed else codes(first, count).float()
    return (whole.view_as(by_row) * by_row).view(-1)[inside].to(getattr(torch, extent.dtype))


def _values(extent: Scaled, scales: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scales.float() - _EXPONENT_BIAS) if extent.packed else scales.float()


def _unpacked(first: int, count: int, codes: ReadCodes) -> torch.Tensor:
    begin = first // 2
    packed = codes(begin, -(-(first + count) // 2) - begin)
    halves = torch.stack([packed & 0xF, packed >> 4], dim=-1).view(-1)
    return _E2M1[halves[first - 2 * begin :][:count].int()]
