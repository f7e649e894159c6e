"""The result of a comparison of two checkpoints, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_ckpt_ext.defaults import SCHEMAS
from mcore_ckpt_ext.formats.accounts import Account
from mcore_ckpt_ext.operations.difference_map import DifferenceMap
from mcore_ckpt_ext.operations.metadata_comparison import MetadataComparison
from mcore_ckpt_ext.operations.options import ComparisonOptions
from mcore_ckpt_ext.operations.resumed_settings import Setting
from mcore_ckpt_ext.operations.short_repr import ShortRepr

SCHEMA = SCHEMAS["diff"]


@dataclass(frozen=True, slots=True)
class PaddingRows:
    """The rows that only one side has, beyond the other's end.

    Attributes:
        only_in: the side that has them, `A` or `B`.
        rows: their number.
        nonzero: the number of their elements that are not zero.
    """

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
    """The comparison of all tensors of one kind.

    Attributes:
        kind: the kind, `weight` or `exp_avg` for example.
        compared: the number of tensors that both sides have.
        elements: the number of elements that were compared.
        only_in_a: the names of tensors that B does not have.
        only_in_b: the names of tensors that A does not have.
        different: the tensors that differ.
    """

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


@dataclass(frozen=True, repr=False)
class Comparison(ShortRepr):
    """The result of a comparison.

    Attributes:
        a: the folder of one checkpoint.
        b: the folder of the other.
        options: the options of the comparison.
        equal: tensors and settings are equal.
        tensors_equal: all tensors are equal, none was missed, and no copies differ.
        settings_equal: all settings are equal; None if they do not count, because a checkpoint has no optimizer, or the
            comparison was restricted to kinds or tensors.
        kinds: the comparison of the tensors of each kind.
        settings: the settings that a resume restores.
        facts: metadata of both, which does not count for equality.
        account_a: what was done with each stored key of A.
        account_b: what was done with each stored key of B.
        missed: the number of keys that were not compared and should be: unknown ones, and weights of which the other
            side has none.
        differing_copies_a: tensors of A whose copies on several ranks differ.
        differing_copies_b: tensors of B whose copies on several ranks differ.
    """

    schema: int
    a: str
    b: str
    options: ComparisonOptions
    equal: bool
    tensors_equal: bool
    settings_equal: bool | None
    kinds: tuple[KindComparison, ...]
    settings: tuple[Setting, ...]
    facts: tuple[MetadataComparison, ...]
    account_a: Account = field(default_factory=Account)
    account_b: Account = field(default_factory=Account)
    missed: int = 0
    differing_copies_a: tuple[str, ...] = ()
    differing_copies_b: tuple[str, ...] = ()
