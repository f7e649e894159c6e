"""The result of a comparison of two checkpoints, as data."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_ckpt_ext.formats.unread_state import UnreadState
from mcore_ckpt_ext.operations.difference_map import DifferenceMap
from mcore_ckpt_ext.operations.metadata_diff import MetadataDifference
from mcore_ckpt_ext.operations.resumed_settings import Setting

SCHEMA = 4


@dataclass(frozen=True, slots=True)
class PaddingRows:
    """Rows that only one of the two has, beyond the other's end: how many, and how many elements are not zero."""

    only_in: str
    rows: int
    nonzero: int


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How one tensor differs.

    Attributes:
        kind: of both tensors.
        name: of both tensors.
        shapes: of A and of B; rows that both have are compared where only the first axis differs.
        dtypes: of A and of B; where they differ, values are compared as float64.
        elements: compared.
        different: elements whose bits differ.
        signed_zeros: of these, 0.0 against -0.0.
        largest: the largest absolute difference between two finite numbers.
        first: the index of the first element that differs, and both values as text (JSON has no NaN).
        padding: rows that only one has.
        problem: why it could not be compared.
        where: a picture of where the differences are; None unless it was asked for, or nothing differs.
    """

    kind: str
    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    elements: int = 0
    different: int = 0
    signed_zeros: int = 0
    largest: float = 0.0
    first: tuple[tuple[int, ...], str, str] | None = None
    padding: PaddingRows | None = None
    problem: str = ""
    where: DifferenceMap | None = None


@dataclass(frozen=True)
class KindComparison:
    """All tensors of one kind."""

    kind: str
    compared: int
    elements: int
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    different: tuple[TensorDifference, ...]

    @property
    def equal(self) -> bool:
        """Same names, shapes, dtypes, and bits."""
        return not (self.only_in_a or self.only_in_b or self.different)


@dataclass(frozen=True)
class Comparison:
    """The result; `facts` do not count for equality.

    `equal`: tensors and settings are. `settings` are those that a resume takes up. They count where both checkpoints
    have an optimizer, and neither kinds nor tensors alone were asked for; otherwise `settings_equal` is None.

    Tensors are not equal while one of the two has keys that nothing here reads (`unread_a`, `unread_b`), or copies of
    one tensor, held by several ranks, that are not the same (`differing_copies_a`, `differing_copies_b`).
    """

    schema: int
    a: str
    b: str
    equal: bool
    tensors_equal: bool
    settings_equal: bool | None
    kinds: tuple[KindComparison, ...]
    settings: tuple[Setting, ...]
    facts: tuple[MetadataDifference, ...]
    unread_a: tuple[UnreadState, ...] = ()
    unread_b: tuple[UnreadState, ...] = ()
    differing_copies_a: tuple[str, ...] = ()
    differing_copies_b: tuple[str, ...] = ()
