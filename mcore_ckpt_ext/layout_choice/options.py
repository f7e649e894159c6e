"""Options of the layout search, in a module that the command line's help can import quickly."""

from __future__ import annotations

from enum import Enum

from mcore_ckpt_ext.errors import UsageError, shorten
from mcore_ckpt_ext.job.dimensions import PINS

_MOST = 1 << 20


class Recomputation(Enum):
    """The activations that are recomputed in the backward pass (`--recompute-granularity`)."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


def parse_sizes(text: str) -> dict[str, int]:
    """Parse the sizes of dimensions, by their names in `PINS`: `tp=8 pp=8`, also separated by commas.

    Raises:
        UsageError: the text has another form, or names a dimension twice.
    """
    sizes: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        label, _, number = word.partition("=")
        label = {"vp": "vpp"}.get(label.lower(), label.lower())
        if label not in PINS or not (number.isascii() and number.isdigit() and 0 < int(number) < _MOST):
            raise UsageError(
                "invalid dimension or size of a layout",
                found=shorten(word, 40),
                expected=f"{', '.join(PINS)} (vp means vpp), each with a whole number: tp=8 pp=8",
            )
        if label in sizes:
            raise UsageError("a dimension is given twice", found=shorten(word, 40), expected="each of them once")
        sizes[label] = int(number)
    return sizes
