"""Decodes quantized weights (codes and scales), and encodes weights to fp8.

Results equal those of transformers on a CPU bit for bit: `Fp8Dequantize` (integrations/finegrained_fp8.py, 5.23)
multiplies in float32 and rounds once; `convert_moe_packed_tensors` (integrations/mxfp4.py) scales by powers of two. Of
NVFP4 they equal those of ModelOpt (`NVFP4QTensor.dequantize`, modelopt/torch/quantization/qtensor/nvfp4_tensor.py,
0.47), which multiplies the scales in float32 first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.planning.array_location import QuantizedMatrix

# E2M1: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXPONENT_BIAS = 127
# Elements per step; intermediate results take a multiple of their size.
_AT_ONCE = 1 << 19

ReadCodes: TypeAlias = "Callable[[int, int], torch.Tensor]"
"""Reads codes or scales, given the index of the first and their number."""


def decode(matrix: QuantizedMatrix, first: int, count: int, codes: ReadCodes, scales: ReadCodes) -> torch.Tensor:
    """Decode elements of a quantized matrix, in row-major order.

    Args:
        matrix: the quantized matrix.
        first: index of the first element.
        count: number of elements.
        codes: reads the codes of the matrix.
        scales: reads the scales of the matrix.
    """
    decoded = torch.empty(count, dtype=getattr(torch, matrix.dtype))
    columns = matrix.columns
    start = 0
    while start < count:
        at = first + start
        left = at % columns
        rows = max(1, _AT_ONCE // columns)
        if left or count - start < columns or columns > _AT_ONCE:
            stop = min(count, start + min(columns - left, _AT_ONCE))
            decoded[start:stop] = _scale_one_row(matrix, at, stop - start, codes, scales)
        else:
            stop = start + min(rows, (count - start) // columns) * columns
            decoded[start:stop] = _whole_rows(matrix, at // columns, (stop - start) // columns, codes, scales)
        start = stop
    return decoded


def scale_reads(scales: ReadCodes, common: torch.Tensor) -> ReadCodes:
    """Return a function that reads scales and multiplies them with one that is common to all, in float32."""
    return lambda first, count: scales(first, count).float() * common.float()


def _scale_one_row(
    matrix: QuantizedMatrix, first: int, count: int, codes: ReadCodes, scales: ReadCodes
) -> torch.Tensor:
    height, width = matrix.block
    row, left = divmod(first, matrix.columns)
    band = row // height * _blocks_across(matrix)
    begin = left // width
    end = -(-(left + count) // width)
    of_blocks = _factors(matrix, scales(band + begin, end - begin))
    return _numbers(matrix, first, count, codes) * of_blocks[torch.arange(left, left + count) // width - begin]


def _whole_rows(matrix: QuantizedMatrix, row: int, rows: int, codes: ReadCodes, scales: ReadCodes) -> torch.Tensor:
    """Decode whole rows in place, band by band: every further pass over them costs as much as reading."""
    height, width = matrix.block
    columns = matrix.columns
    across = _blocks_across(matrix)
    first = row // height
    last = -(-(row + rows) // height)
    grid = _factors(matrix, scales(first * across, (last - first) * across)).view(-1, across)
    spread = grid if across == 1 else grid.repeat_interleave(width, dim=1)[:, :columns]
    decoded = _numbers(matrix, row * columns, rows * columns, codes).view(rows, columns)
    if height == 1:
        decoded *= spread
    else:
        for band, of_band in zip(range(first, last), spread, strict=True):
            decoded[max(band * height - row, 0) : (band + 1) * height - row] *= of_band
    return decoded.view(-1)


def _blocks_across(matrix: QuantizedMatrix) -> int:
    return -(-matrix.columns // matrix.block[1])


def _numbers(matrix: QuantizedMatrix, first: int, count: int, codes: ReadCodes) -> torch.Tensor:
    """Return the numbers of codes in new memory, not scaled yet."""
    if matrix.packed:
        numbers = _unpack(first, count, codes)
        return numbers if matrix.common_scale is None else numbers.add_(0.0)  # ModelOpt has no negative zero
    numbers = codes(first, count)
    # A table is five times as fast on a CPU as torch's own conversion of fp8 (2.13, measured).
    if numbers.dtype.itemsize == 1 and numbers.is_floating_point():
        return _numbers_of(numbers.dtype).index_select(0, numbers.view(torch.uint8).int())
    return numbers.to(torch.float32, copy=True)


@cache
def _numbers_of(dtype: torch.dtype) -> torch.Tensor:
    """Return the number for each code of one byte."""
    return torch.arange(1 << 8, dtype=torch.uint8).view(dtype).float()


def _factors(matrix: QuantizedMatrix, scales: torch.Tensor) -> torch.Tensor:
    factors = torch.exp2(scales.float() - _EXPONENT_BIAS) if scales.dtype == torch.uint8 else scales.float()
    if not torch.isfinite(factors).all():
        raise UnreadableCheckpointError(
            "a scale of quantized weights is not a finite number",
            where=matrix.scales.file,
            hint="the folder is damaged: download it again",
        )
    return factors


def _unpack(first: int, count: int, codes: ReadCodes) -> torch.Tensor:
    begin = first // 2
    packed = codes(begin, -(-(first + count) // 2) - begin)
    halves = torch.stack([packed & 0xF, packed >> 4], dim=-1).view(-1)
    return torch.tensor(_E2M1)[halves[first - 2 * begin :][:count].int()]


def block_scales(band: torch.Tensor, width: int, name: str) -> torch.Tensor:
    """Return the scales of a band's blocks, which map the largest absolute value to that of fp8 (E4M3).

    Computed as in DeepSeek's `act_quant` (DeepSeek-V3, inference/kernel.py); the scale of a block of zeros is 1.

    Args:
        band: `[rows of a block, columns]`, in float32.
        width: number of columns of a block.
        name: name of the matrix, for messages.

    Raises:
        UnsupportedCheckpointError: a number is not finite.
    """
    if not band.isfinite().all():
        raise UnsupportedCheckpointError(
            "a weight is not a finite number and cannot be quantized",
            where=name,
            hint="leave --quantize out",
        )
    largest = torch.stack([part.abs().max() for part in torch.split(band, width, dim=1)])
    scales = largest / torch.finfo(torch.float8_e4m3fn).max
    return torch.where(scales > 0, scales, torch.ones(()))  # also for values too small for any scale


def encode(band: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    """Return the fp8 codes of a band, `[rows, columns]`, given the scales of its blocks."""
    spread = scales.repeat_interleave(width)[: band.shape[1]]
    return (band / spread).to(torch.float8_e4m3fn)
