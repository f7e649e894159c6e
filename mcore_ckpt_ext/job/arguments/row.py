"""A row of the table of Megatron's arguments: everything that this package needs of one argument.

A row is a descriptor. `JobArguments` and `ModelArguments` inherit the tables, and so have an attribute for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar, overload

from mcore_ckpt_ext.job.arguments.kinds import REQUIRED, Values
from mcore_ckpt_ext.job.releases import releases_between
from mcore_ckpt_ext.versions import OLDEST, Version, parse_version

T = TypeVar("T")
D = TypeVar("D")


class _Default(Enum):
    DEFAULT = "the default of the row"


DEFAULT: Final = _Default.DEFAULT


class Condition(NamedTuple):
    """Another argument that has a value; None stands for every value but None, False and 0."""

    argument: str
    value: Any = None

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        """Whether the condition holds in a job.

        Args:
            value_of: returns an argument of the job by its name.
        """
        found = value_of(self.argument)
        return bool(found) if self.value is None else bool(found == self.value)


@dataclass(frozen=True)
class AnyBut:
    """The neutral values of an argument that is neutral with every value but some; of several at once, each."""

    others: tuple[Any, ...]


class Plain(Enum):
    """Effects of an argument that need no further description."""

    SHAPES = "shapes"  # every family expresses it, by the shapes of its parameters if not by a setting
    NOTHING = "nothing"  # it leaves the forward pass of a trained model as it is


SHAPES: Final = Plain.SHAPES
NOTHING: Final = Plain.NOTHING


@dataclass(frozen=True)
class Changes:
    """The effect of an argument that changes the forward pass, unless it has its neutral value.

    Attributes:
        only_with: the arguments with one of which it counts; without any it always counts.
        neutral: the value under which it changes nothing.
    """

    only_with: tuple[Condition, ...] = ()
    neutral: Any = DEFAULT


@dataclass(frozen=True)
class Alias:
    """The effect of another name: of an older release, or of the parser where the configuration has another."""

    of: str


@dataclass(frozen=True)
class Noted:
    """The effect of an argument that a Hugging Face model cannot have, and that leaves its weights as they are."""

    why: str


Effect: TypeAlias = Changes | Alias | Noted | Plain


def changes(*only_with: Condition, neutral: Any = DEFAULT) -> Changes:
    """Return the effect of an argument that changes the forward pass."""
    return Changes(only_with, neutral)


CHANGES = changes()


@dataclass(frozen=True)
class Flag:
    """The flag of `pretrain_gpt.py` that sets an argument of a model.

    Attributes:
        form: a flag with a value, one that switches the argument on, or one that switches it off.
        only_with: the arguments with one of which it applies; without any it always does.
        unless: the argument with which it does not apply.
        without: the value that a job has without the flag.
        spelled: the flag; `--` and the argument's name with dashes, where this is empty.
    """

    form: Literal["value", "on", "off"] = "value"
    only_with: tuple[Condition, ...] = ()
    unless: Condition | None = None
    without: Any = DEFAULT
    spelled: str = ""

    def applies(self, value_of: Callable[[str], Any]) -> bool:
        """Whether the flag is meant for a model: `value_of` returns its arguments by name."""
        is_of_model = not self.only_with or any(condition.holds(value_of) for condition in self.only_with)
        return is_of_model and not (self.unless and self.unless.holds(value_of))

    def spelling(self, argument: str) -> str:
        """The flag, as it stands on the command line."""
        return self.spelled or f"--{argument.replace('_', '-')}"


def value(*only_with: Condition, unless: Condition | None = None, without: Any = DEFAULT, spelled: str = "") -> Flag:
    """Return a flag that is followed by the value."""
    return Flag("value", only_with, unless, without, spelled)


def switch(*, spelled: str) -> Flag:
    """Return a flag that switches an argument on, and has another name than it."""
    return Flag("on", spelled=spelled)


def off(spelled: str, *only_with: Condition) -> Flag:
    """Return a flag that switches an argument off."""
    return Flag("off", only_with, spelled=spelled)


VALUE, ON = Flag(), Flag("on")


@dataclass(frozen=True)
class BridgeField:
    """A field of Megatron-Bridge's `run_config.yaml` that is an argument.

    Attributes:
        section: its section of the file; those of `model` are fields of Megatron Core's configuration, too.
        name: its name; that of the argument, where this is empty.
        only_with: the argument with which it is that field; None where it always is.
        is_written: whether the file that is written for a new model states it.
    """

    section: str = "model"
    name: str = ""
    only_with: Condition | None = None
    is_written: bool = True


def bridge(*only_with: Condition, name: str = "") -> tuple[BridgeField, ...]:
    """Return the field of a model, or one for each of several conditions."""
    return tuple(BridgeField(name=name, only_with=one) for one in only_with) or (BridgeField(name=name),)


def reads(*places: str) -> tuple[BridgeField, ...]:
    """Return fields that are only read, each given as `section.name`, or as `section` with the argument's own name."""
    parts = [place.partition(".") for place in places]
    return tuple(BridgeField(section, name, is_written=False) for section, _, name in parts)


SAME = bridge()


class PartialArguments:
    """Arguments as a job states them: each may be unknown."""

    def value_of(self, name: str) -> Any:
        """An argument by its name; None where it is not known."""
        raise NotImplementedError


class CompleteArguments:
    """Arguments that all have a value, though that may be Megatron's None."""

    def value_of(self, name: str) -> Any:
        """An argument by its name."""
        raise NotImplementedError


@dataclass(eq=False)
class Argument(Generic[T, D]):
    """A row: one argument. As an attribute of a job or of a model it is the argument's value there.

    Attributes:
        values: those that it can have. The default is what it means where a job does not have it because its version
            did not have it yet (megatron/training/arguments.py and TransformerConfig, core_v0.7.0 to 0.19.2).
        effect: what it does to the forward pass.
        flag: the flag of `pretrain_gpt.py` that sets it for a model; None where there is none.
        bridge: the fields of Megatron-Bridge that are this argument.
        since: the release of Megatron from which on every one has it; empty where the oldest known one has it.
        until: the first release that no longer has it; empty where the newest one has it.
        is_parsed: whether any release has it; otherwise other training loops describe their jobs by it.
        name: that of the argument, which is the attribute's.
    """

    values: Values[T, D]
    effect: Effect = CHANGES
    flag: Flag | None = None
    bridge: tuple[BridgeField, ...] = ()
    _: KW_ONLY
    since: str = ""
    until: str = ""
    is_parsed: bool = True
    name: str = field(default="", init=False)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Argument[T, D]: ...
    @overload
    def __get__(self, instance: PartialArguments, owner: type) -> T | None: ...
    @overload
    def __get__(self, instance: CompleteArguments, owner: type) -> D: ...
    def __get__(self, instance: PartialArguments | CompleteArguments | None, owner: type) -> Any:
        return self if instance is None else instance.value_of(self.name)

    @property
    def neutral(self) -> Any:
        """The value under which it does not change the forward pass."""
        if isinstance(self.effect, Changes) and self.effect.neutral is not DEFAULT:
            return self.effect.neutral
        return self.values.default

    @property
    def without_flag(self) -> Any:
        """The value that a job has without the flag; None where every job gives it."""
        found = self.values.default if self.flag is None or self.flag.without is DEFAULT else self.flag.without
        return None if found is REQUIRED else found

    @property
    def releases(self) -> list[Version]:
        """The known releases whose parser has it."""
        first, end = parse_version(self.since) or OLDEST, parse_version(self.until)
        found = releases_between(first) if self.is_parsed else []
        return [version for version in found if end is None or version not in releases_between(end)]


def rows_of(*tables: type) -> dict[str, Argument[Any, Any]]:
    """Return the rows of tables by the names of their arguments."""
    found = (row for table in tables for row in vars(table).values() if isinstance(row, Argument))
    return {row.name: row for row in found}
