"""A digest of one parameter's state that its parts add up to, so that each rank computes its own part where it lies.

It tells which values lie at which elements: eight bytes at a time are a number, and a multiplier of its own for each
place times that number is summed modulo 2**64. Parts may begin and end anywhere: what they lack of eight bytes counts
as zero in each of them. One value that differs always shows. Two states that differ in many places, as those of two
parameters do, have the same digest by chance once in 2**64 times. An exchange of two values alone may not show: where
both are the last int16 of a word, and their difference is an odd number times 2**k, in one of 2**(15 - k) pairs of
places, and more rarely elsewhere. It is no protection against someone who means to deceive. It costs less than copying
the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, reduce

from mcore_ckpt_ext.layout.master_check import bits_dtype
from mcore_ckpt_ext.lazy_torch import torch

_WORD = 8
_BLOCK = 1 << 20
_MODULUS = 1 << 64
# Every element counts, be it zero.
_COUNTED = -7046029254386353131


def digest_of(values: torch.Tensor, start: int = 0) -> int:
    """The digest of a parameter's elements `[start, start + numel)`, 1-D, of any dtype; parts are added by `added`."""
    return int(running_digest(values, start)) % _MODULUS


def running_digest(values: torch.Tensor, start: int = 0) -> torch.Tensor:
    """The same as a 0-dimensional int64 on the device of the values, which nobody has waited for."""
    bits = values.detach().reshape(-1).contiguous().view(bits_dtype(values.dtype.itemsize))
    each = _WORD // values.dtype.itemsize
    numel, missing = bits.numel(), -start % each
    head, tail = min(missing, numel), (numel - min(missing, numel)) % each
    whole = bits[head : numel - tail]
    # A model has many small parameters, whose shards mostly begin and end with a word: what is not there costs nothing.
    parts: list[torch.Tensor] = []
    if head:
        parts += _products(_padded(bits[:head], start % each, each), start // each)
    if whole.numel():
        words = whole.clone() if whole.storage_offset() % each else whole
        parts += _products(words.view(torch.int64), (start + head) // each)
    if tail:
        parts += _products(_padded(bits[numel - tail :], 0, each), (start + numel - tail) // each)
    counted = _wrapped(_COUNTED * numel)
    if not parts:
        return torch.full((), counted, dtype=torch.int64, device=bits.device)
    return reduce(torch.add, parts) + counted  # int64 wraps around


def _padded(bits: torch.Tensor, before: int, each: int) -> torch.Tensor:
    """Fewer than eight bytes as a number, the first of them after so many elements."""
    room = bits.new_zeros(each)
    room[before : before + bits.numel()] = bits
    return room.view(torch.int64)


def _products(words: torch.Tensor, start: int) -> Iterator[torch.Tensor]:
    """For each block of words from place `start` on, their sum, each times its multiplier."""
    multipliers = _multipliers(str(words.device))
    for block in range(start // _BLOCK, -(-(start + words.numel()) // _BLOCK)):
        first, last = max(start, block * _BLOCK), min(start + words.numel(), (block + 1) * _BLOCK)
        own, beside = words[first - start : last - start], multipliers[first - block * _BLOCK : last - block * _BLOCK]
        # A product that is kept nowhere is several times as fast; torch has it for whole numbers on processors only.
        yield (torch.dot(own, beside) if own.device.type == "cpu" else (own * beside).sum()) * _scale(block)


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
def _multipliers(device: str) -> torch.Tensor:
    """One for each word of a block."""
    return _scrambled(torch.arange(_BLOCK, device=device))


@lru_cache(maxsize=1 << 16)
def _scale(block: int) -> int:
    """The multiplier of all words of a block."""
    return int(_scrambled(torch.tensor(block)))


def _scrambled(numbers: torch.Tensor) -> torch.Tensor:
    """Odd numbers without a pattern, made of int64 as splitmix64 does; its shifts are of signed numbers here."""
    mixed = (numbers.long() + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed ^ (mixed >> 31)) | 1


def _wrapped(number: int) -> int:
    """A number as int64 has it."""
    return (number + _MODULUS // 2) % _MODULUS - _MODULUS // 2
