"""A digest of one parameter's state that its parts add up to, so that each rank computes its own part where it lies.

It tells which values lie at which elements: a multiplier for each element times the bits of its value, summed modulo
2**64. Two states that differ have the same digest by chance once in 2**48 times or less; it is no protection against
someone who means to deceive. A few operations an element, on whatever device the values are.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_BLOCK = 1 << 20
_MODULUS = 1 << 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(values: torch.Tensor, start: int = 0) -> int:
    """The digest of a parameter's elements `[start, start + numel)`, 1-D, of any dtype; parts are added by `added`."""
    return int(running_digest(values, start)) % _MODULUS


def running_digest(values: torch.Tensor, start: int = 0) -> torch.Tensor:
    """The same as a 0-dimensional int64 on the device of the values, which nobody has waited for."""
    bits = values.detach().reshape(-1).contiguous().view(_BITS[values.dtype.itemsize])
    multipliers, sums = _multipliers(str(bits.device))
    blocks = range(start // _BLOCK, -(-(start + bits.numel()) // _BLOCK))
    scales = _scrambled(torch.arange(blocks.start, blocks.stop)).tolist()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for block, scale in zip(blocks, scales, strict=True):
        first, last = max(start, block * _BLOCK), min(start + bits.numel(), (block + 1) * _BLOCK)
        at = slice(first - block * _BLOCK, last - block * _BLOCK)
        # As if each value were one more, so that zeros count, too; int64 wraps around.
        total += ((bits[first - start : last - start] * multipliers[at]).sum() + sums[at.stop] - sums[at.start]) * scale
    return total


def added(*parts: int) -> int:
    """The digest of elements whose digests these are, each element in one of them."""
    return sum(parts) % _MODULUS


def written(digest: int) -> str:
    """As it stands in a sidecar: 16 hexadecimal digits."""
    return f"{digest:016x}"


def read(text: str) -> int:
    """What stands in a sidecar.

    Raises:
        ValueError: that is no digest.
    """
    return int(text, 16) % _MODULUS


@lru_cache(maxsize=4)
def _multipliers(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One for each element of a block, and the sum of those before each."""
    multipliers = _scrambled(torch.arange(_BLOCK, device=device))
    return multipliers, torch.cat([multipliers.new_zeros(1), multipliers.cumsum(0)])


def _scrambled(numbers: torch.Tensor) -> torch.Tensor:
    """Odd numbers without a pattern, made of int64 as splitmix64 does; its shifts are of signed numbers here."""
    mixed = (numbers.long() + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed ^ (mixed >> 31)) | 1
