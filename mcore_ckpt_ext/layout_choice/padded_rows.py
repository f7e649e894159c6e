"""The rows of the vocabulary, padded for a tensor parallel size."""

from __future__ import annotations

from math import isqrt

ROWS_DIVISOR = 128
"""Megatron's default of `--make-vocab-size-divisible-by`."""


class PaddedRows:
    """Computes the rows of the vocabulary, padded for a tensor parallel size.

    They are a multiple of `--make-vocab-size-divisible-by` x TP (`vocab_size_with_padding`,
    megatron/core/tokenizers/utils/build_tokenizer.py, and `_vocab_size_with_padding` before it, core_v0.7.0 to 0.19.2).
    Rows of padding take part in the softmax, so that another number of them changes the loss; another divisor keeps it.
    """

    def __init__(self, tokens: int | None, stored: int, divisor: int) -> None:
        """`tokens`: the number without padding; if it is None, the `stored` rows are padded further.

        `stored`: the rows in the checkpoint; 0 if they are unknown. `divisor`: that of the job.
        """
        self.stored = stored
        self._tokens = tokens
        self._divisor = divisor

    def __call__(self, tensor: int) -> int:
        """Return the number of rows for a tensor-parallel size, with the divisor that `divisor_for` returns."""
        return self._pad((self.divisor_for(tensor) or self._divisor) * tensor)

    def with_own_divisor(self, tensor: int) -> int:
        """Return the number of rows for a tensor-parallel size, with the divisor of the job."""
        return self._pad(self._divisor * tensor)

    def divisor_for(self, tensor: int) -> int | None:
        """Return the divisor that keeps the rows of the checkpoint, as small as possible.

        Returns:
            None if the job's own divisor keeps them, or none does.
        """
        rows = self.stored
        if not rows or rows % tensor or self.with_own_divisor(tensor) == rows:
            return None
        shares = rows // tensor
        padding = rows - self._tokens if self._tokens is not None else rows - 1
        divisors = {size for low in range(1, isqrt(shares) + 1) if shares % low == 0 for size in (low, shares // low)}
        return min((size for size in divisors if size * tensor > padding >= 0), default=None)

    def _pad(self, multiple: int) -> int:
        return -(-(self._tokens or self.stored) // multiple) * multiple
