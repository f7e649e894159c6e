"""The result of a comparison of two checkpoints, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_ckpt_ext.defaults import SCHEMAS
from mcore_ckpt_ext.formats.accounts import Account
from mcore_ckpt_ext.operations.difference_map import DifferenceMap
from mcore_ckpt_ext.operations.metadata_diff import MetadataDifference
from mcore_ckpt_ext.operations.resumed_settings import Setting

SCHEMA = SCHEMAS["diff"]


@dataclass(frozen=True, slots=True)
class PaddingRows:
    """The rows that only one side has, beyond the other's end: their number, and their nonzero elements."""

    only_in: str
    rows: int
    nonzero: int


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The differences of one tensor.

    Attributes:
        kind: the kind of both tensors.
        name: the name of both tensors.
        shapes: the shapes of A and B; if only the first axis differs, the rows that both have are compared.
        dtypes: the dtypes of A and B; if they differ, values are compared as float64.
        elements: the number of elements that were compared.
        different: the number of elements whose bits differ.
        signed_zeros: the number of these that are 0.0 in one and -0.0 in the other.
        largest: the largest absolute difference between two finite numbers.
        first: the index of the first element that differs, and both values as text (JSON has no NaN).
        padding: rows that only one side has; None if there are none.
        problem: why it could not be compared; empty if it was.
        where: a picture of the places of the differences; None if it was not requested, or nothing differs.
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

    @property
    def differs(self) -> bool:
        """True if shapes, dtypes or bits differ, or the tensors cannot be compared."""
        same_form = self.shapes[0] == self.shapes[1] and self.dtypes[0] == self.dtypes[1]
        return bool(self.different or self.problem or not same_form)


@dataclass(frozen=True)
class KindComparison:
    """The comparison of all tensors of one kind."""

    kind: str
    compared: int
    elements: int
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    different: tuple[TensorDifference, ...]

    @property
    def equal(self) -> bool:
        """True if names, shapes, dtypes and bits are equal."""
        return not (self.only_in_a or self.only_in_b or self.different)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison; `facts` do not count for equality.

    `equal`: True if tensors and settings are equal. `settings` are those that a resume restores. They count if both
    checkpoints have an optimizer, and the user did not restrict the comparison to kinds or tensors; else
    `settings_equal` is None. Tensors are not equal if `missed` keys were not compared that should be
    (`account_a`, `account_b`): unknown ones, and weights of which the other side has none; or if copies of one tensor
    differ on several ranks (`differing_copies_a`, `differing_copies_b`).
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
    account_a: Account = field(default_factory=Account)
    account_b: Account = field(default_factory=Account)
    missed: int = 0
    differing_copies_a: tuple[str, ...] = ()
    differing_copies_b: tuple[str, ...] = ()
