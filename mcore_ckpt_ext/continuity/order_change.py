"""The account of the data of a resumed job: a verdict on its order, and the reasons for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mcore_ckpt_ext.continuity.batch_sizes import BatchSize
from mcore_ckpt_ext.errors import quantity

SAME_ORDER: Final = "same order"
EACH_ONCE: Final = "each sample once"
CHANGES: Final = "changes"
UNKNOWN: Final = "unknown"
NEEDS_DATA_SAMPLES: Final = (
    "no checkpoint has the size of the data set; with it, --data-samples of `mcore-ckpt plan` counts them"
)
"""Why it is not known how many samples a random sampler reads again or never."""


@dataclass(frozen=True)
class OrderChange:
    """A reason why the order of the samples changes, or why that is not known.

    Attributes:
        what: what differs, in words, with the old and the new value.
        why: its effect.
        source: where that was read; empty if it is no rule of Megatron.
        hint: what keeps the order; empty if nothing differs that could be kept.
        verdict: the verdict because of it alone: `changes` or `unknown`.
        uncounted: why it is not known how many samples are read again or never.
    """

    what: str
    why: str
    source: str = ""
    hint: str = ""
    verdict: str = CHANGES
    uncounted: str = "no checkpoint has the index from which the orders are drawn"


@dataclass(frozen=True)
class DataOrder:
    """The account of a job that reads on where the last one stopped: in the same order, or not.

    Attributes:
        verdict: `same order`, `each sample once` (in other batches), `changes` or `unknown`.
        sample: the number of samples that were consumed; None if it is unknown.
        changes: why it is not the same order.
        note: how it goes on, where this package has to see to that, or Megatron ignores a ramp; empty otherwise.
        read_again: how many samples will be read again; None if that is unknown.
        never_read: how many will never be read; None if that is unknown.
        uncounted: why the two are unknown; empty otherwise.
        indivisible: batch sizes that are still to come and that the layout does not divide: training stops there.
        is_changed: True if anything differs that the order could depend on.
    """

    verdict: str
    sample: int | None
    changes: tuple[OrderChange, ...] = ()
    note: str = ""
    read_again: int | None = None
    never_read: int | None = None
    uncounted: str = ""
    indivisible: tuple[BatchSize, ...] = ()
    is_changed: bool = False

    @property
    def goes_on(self) -> bool:
        """True if each sample is read once, and no batch size to come stops the training."""
        return self.verdict in (SAME_ORDER, EACH_ONCE) and not self.indivisible

    @property
    def is_remarkable(self) -> bool:
        """True if a user should read it even where a resume is otherwise silent."""
        return bool(self.note or self.indivisible or (self.is_changed and not self.goes_on))

    @property
    def sentence(self) -> str:
        """The account in one line."""
        place = "an unknown sample" if self.sample is None else f"sample {self.sample:,}"
        if self.verdict in (SAME_ORDER, EACH_ONCE):
            text = f"data: goes on at {place}, {self.verdict}"
        else:
            reasons = "; ".join(f"{change.what}: {change.why}" for change in self.changes)
            begin = "another order" if self.verdict == CHANGES else "not known whether in the same order"
            text = f"data: goes on at {place}, {begin} ({reasons}){self._count}"
        if self.note:
            text += f"; {self.note}"
        if self.indivisible:
            first = self.indivisible[0]
            text += (
                f"; training will stop at sample {first.sample:,}: the layout does not divide the global batch size "
                f"{first.size:,} that is due there"
            )
        return text

    @property
    def hint(self) -> str:
        """All that would keep the order, for messages; empty if nothing would."""
        return "; ".join(dict.fromkeys(change.hint for change in self.changes if change.hint))

    @property
    def _count(self) -> str:
        """The counts, or why they are unknown; empty if the order itself is unknown."""
        if self.verdict != CHANGES:
            return ""
        if self.read_again is None or self.never_read is None:
            return f"; how many samples are read again or never is not known: {self.uncounted}"
        return f"; {quantity(self.read_again, 'sample')} will be read again, {self.never_read:,} never"
