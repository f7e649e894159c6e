"""A digest of one parameter's state that is the sum of its parts' digests.

Each rank digests its own part. The digest depends on values and on their positions. Each eight bytes are an integer,
which is multiplied by a factor of its position; the products are summed modulo 2**64. Parts may begin and end anywhere:
a partial word is padded with zeros in each of its parts. A single different value always changes the digest. Two states
that differ in many places, for example those of two parameters, have equal digests with probability 2**-64. If only two
values are exchanged, the digests may be equal, too: for one in 2**(15 - k) pairs of positions if both values are the
last int16 of a word and their difference is an odd number times 2**k, and less often elsewhere. The digest does not
protect against deliberate forgery. It costs less than copying the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, reduce

from mcore_ckpt_ext.layout.master_check import bits_dtype
from mcore_ckpt_ext.lazy_torch import torch

_WORD = 8
_BLOCK = 1 << 20
_MODULUS = 1 << 64
# Added for every element, so that zeros count, too.
_COUNTED = -7046029254386353131


def digest_tensor(values: torch.Tensor, start: int = 0) -> int:
    """Return the digest of a parameter's elements from `start` on: 1-D, of any dtype."""
    return int(digest_on_device(values, start)) % _MODULUS


def digest_on_device(values: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return the digest as a 0-dimensional int64 on the device of the values, without synchronization."""
    bits = values.detach().reshape(-1).contiguous().view(bits_dtype(values.dtype.itemsize))
    per_word = _WORD // values.dtype.itemsize
    numel = bits.numel()
    head = min(-start % per_word, numel)
    tail = (numel - head) % per_word
    whole = bits[head : numel - tail]
    # Models have many small parameters, whose shards mostly begin and end at a word, so absent parts are not computed.
    parts: list[torch.Tensor] = []
    if head:
        parts += _products(_pad(bits[:head], start % per_word, per_word), start // per_word)
    if whole.numel():
        words = whole.clone() if whole.storage_offset() % per_word else whole
        parts += _products(words.view(torch.int64), (start + head) // per_word)
    if tail:
        parts += _products(_pad(bits[numel - tail :], 0, per_word), (start + numel - tail) // per_word)
    counted = _wrap(_COUNTED * numel)
    if not parts:
        return torch.full((), counted, dtype=torch.int64, device=bits.device)
    return reduce(torch.add, parts) + counted  # int64 wraps around


def _pad(bits: torch.Tensor, before: int, per_word: int) -> torch.Tensor:
    """Return fewer than eight bytes as an integer, preceded by `before` elements of zero."""
    room = bits.new_zeros(per_word)
    room[before : before + bits.numel()] = bits
    return room.view(torch.int64)


def _products(words: torch.Tensor, start: int) -> Iterator[torch.Tensor]:
    """Yield the sum of each block of words from position `start` on, each word times its factor."""
    word_factors = _word_factors(str(words.device))
    for block in range(start // _BLOCK, -(-(start + words.numel()) // _BLOCK)):
        first = max(start, block * _BLOCK)
        last = min(start + words.numel(), (block + 1) * _BLOCK)
        part = words[first - start : last - start]
        factors = word_factors[first - block * _BLOCK : last - block * _BLOCK]
        # `dot` stores no products, which is several times faster; torch has it for integers on CPUs only.
        yield (torch.dot(part, factors) if part.device.type == "cpu" else (part * factors).sum()) * _block_factor(block)


def join_digests(*parts: int) -> int:
    """Return the digest of all elements from the digests of disjoint parts."""
    return sum(parts) % _MODULUS


def format_digest(digest: int) -> str:
    """Format a digest for a sidecar: 16 hexadecimal digits."""
    return f"{digest:016x}"


def parse_digest(text: str) -> int:
    """Parse a digest of a sidecar.

    Raises:
        ValueError: the text is not a digest.
    """
    return int(text, 16) % _MODULUS


@lru_cache(maxsize=4)
def _word_factors(device: str) -> torch.Tensor:
    """Return a factor for each word of a block."""
    return _scramble(torch.arange(_BLOCK, device=device))


@lru_cache(maxsize=1 << 16)
def _block_factor(block: int) -> int:
    """Return the common factor of all words of a block."""
    return int(_scramble(torch.tensor(block)))


def _scramble(numbers: torch.Tensor) -> torch.Tensor:
    """Return odd pseudorandom numbers from int64 as splitmix64 does, but with shifts of signed numbers."""
    mixed = (numbers.long() + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return (mixed ^ (mixed >> 31)) | 1


def _wrap(number: int) -> int:
    """Wrap an integer around to int64."""
    return (number + _MODULUS // 2) % _MODULUS - _MODULUS // 2
