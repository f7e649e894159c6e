"""The request of a layout search, and a layout that it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from mcore_ckpt_ext.continuity.dependencies import Difference
from mcore_ckpt_ext.layout_choice.choice import Choice
from mcore_ckpt_ext.layout_choice.memory import Memory
from mcore_ckpt_ext.layout_choice.model_table import StageHolding
from mcore_ckpt_ext.layout_choice.options import Recomputation
from mcore_ckpt_ext.versions import Version

# The share of memory by which an estimate may be wrong.
_ESTIMATE_ERROR = 0.1
# A layout that needs more than this multiple of what a job ran in comes last while the memory of a GPU is unknown.
_MOST_OF_USUAL = 1.25


@dataclass(frozen=True)
class SearchRequest:
    """The hardware and the options of a layout search.

    Attributes:
        gpus_per_node: number of GPUs of a node; larger tensor parallel sizes cross nodes.
        version: the Megatron release that would run.
        memory: bytes of a GPU; None if unknown.
        is_least: whether `memory` is a lower bound, because a job ran in it.
        pins: fixed sizes, by their names in `ParallelLayout`.
    """

    gpus: int
    gpus_per_node: int
    version: Version
    memory: int | None = None
    is_least: bool = False
    recomputation: Recomputation = Recomputation.SELECTIVE
    pins: Mapping[str, int] = field(default_factory=dict)

    def fits(self, needed: int) -> bool | None:
        """Return whether a GPU has a number of bytes; None if that is unknown."""
        if self.memory is not None and needed <= self.memory:
            return True
        return None if self.memory is None or self.is_least else False

    def exceeds(self, needed: int) -> bool:
        """Return whether a number of bytes is so large that its layout comes after all others."""
        if self.memory is None:
            return False
        return needed > (round(self.memory * _MOST_OF_USUAL) if self.is_least else self.memory)

    def pressure(self, needed: int) -> int:
        """Return how far a number of bytes is beyond what surely fits, in steps of the estimate's error."""
        if self.memory is None:
            return 0
        safe = self.memory if self.is_least else round(self.memory * (1 - _ESTIMATE_ERROR))
        return max(ceil((needed / safe - 1) / _ESTIMATE_ERROR), 0)


@dataclass(frozen=True, slots=True)
class FoundLayout:
    """A layout that Megatron accepts.

    Attributes:
        choice: the layout with its batch.
        memory: the memory of the fullest GPU.
        fits: whether that is within a GPU's memory; None if unknown.
        form_changes: see `order.form_changes`.
        holdings: the totals on a rank of each pipeline stage.
        differences: all that training computes otherwise, apart from rounding.
    """

    choice: Choice
    memory: Memory
    fits: bool | None
    form_changes: int
    holdings: tuple[StageHolding, ...]
    differences: tuple[Difference, ...]
