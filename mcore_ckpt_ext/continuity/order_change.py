"""Verdicts on the order of the data of a resumed job, and the reasons for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SAME_ORDER: Final = "same order"
EACH_ONCE: Final = "each sample once"
CHANGES: Final = "changes"
UNKNOWN: Final = "unknown"


@dataclass(frozen=True)
class OrderChange:
    """A reason why the order of the samples changes, or why that is not known.

    Attributes:
        what: what differs, in words, with the old and the new value.
        why: its effect.
        source: where that was read; empty if it is no rule of Megatron.
        hint: what keeps the order; empty if nothing differs that could be kept.
        verdict: the verdict because of it alone: `changes` or `unknown`.
    """

    what: str
    why: str
    source: str = ""
    hint: str = ""
    verdict: str = CHANGES
