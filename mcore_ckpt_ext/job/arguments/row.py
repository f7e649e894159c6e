"""A row of the table of Megatron's arguments: all that this package uses of an argument.

A row is a descriptor. `JobArguments` and `ModelArguments` inherit the tables, so they have an attribute for each row.
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
    """A condition on the value of another argument; None means any value except None, False and 0."""

    argument: str
    value: Any = None

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        """Return whether a job meets the condition.

        Args:
            value_of: returns an argument of the job by name.
        """
        actual = value_of(self.argument)
        return bool(actual) if self.value is None else bool(actual == self.value)


class Without(NamedTuple):
    """A condition that a job meets without any of several other arguments."""

    arguments: tuple[str, ...]

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        """Return whether a job meets the condition; see `Condition.holds`."""
        return not any(value_of(name) for name in self.arguments)


@dataclass(frozen=True)
class AnyBut:
    """Neutral values of an argument: all except `others`. For a list, each item must be neutral."""

    others: tuple[Any, ...]


class Plain(Enum):
    """Effects of an argument that need no further description."""

    SHAPES = "shapes"  # every family expresses it, by a setting or by the shapes of its parameters
    NOTHING = "nothing"  # it does not change the forward pass of a trained model


SHAPES: Final = Plain.SHAPES
NOTHING: Final = Plain.NOTHING


@dataclass(frozen=True)
class Changes:
    """The effect of an argument that changes the forward pass if it differs from its neutral value.

    Attributes:
        only_with: the argument has an effect if one of these conditions holds; if empty, always.
        neutral: the value without effect.
    """

    only_with: tuple[Condition | Without, ...] = ()
    neutral: Any = DEFAULT


@dataclass(frozen=True)
class Alias:
    """The effect of another name: that of an older release, or the parser's, not the configuration's."""

    of: str


@dataclass(frozen=True)
class Noted:
    """The effect of an argument that Hugging Face models cannot express and that concerns no weights.

    Attributes:
        why: the notice for users.
        without: values that need no notice.
    """

    why: str
    without: tuple[Any, ...] = ()


Effect: TypeAlias = Changes | Alias | Noted | Plain


def changes(*only_with: Condition | Without, neutral: Any = DEFAULT) -> Changes:
    """Return the effect of an argument that changes the forward pass."""
    return Changes(only_with, neutral)


CHANGES = changes()


@dataclass(frozen=True)
class Flag:
    """The command-line flag of `pretrain_gpt.py` that sets an argument of a model.

    Attributes:
        form: the flag has a value, switches the argument on, or switches it off.
        only_with: the flag applies if one of these conditions holds; if empty, always.
        unless: the flag does not apply if this condition holds.
        without: the value of the argument without the flag.
        spelled: the flag; if empty, `--` and the argument's name with dashes.
    """

    form: Literal["value", "on", "off"] = "value"
    only_with: tuple[Condition, ...] = ()
    unless: Condition | None = None
    without: Any = DEFAULT
    spelled: str = ""

    def applies(self, value_of: Callable[[str], Any]) -> bool:
        """Return whether the flag applies to a model, whose arguments `value_of` returns by name."""
        is_of_model = not self.only_with or any(condition.holds(value_of) for condition in self.only_with)
        return is_of_model and not (self.unless and self.unless.holds(value_of))

    def spelling(self, argument: str) -> str:
        """Return the flag as it is written on the command line."""
        return self.spelled or f"--{argument.replace('_', '-')}"


def value(*only_with: Condition, unless: Condition | None = None, without: Any = DEFAULT, spelled: str = "") -> Flag:
    """Return a flag that is followed by a value."""
    return Flag("value", only_with, unless, without, spelled)


def switch(*, spelled: str) -> Flag:
    """Return a flag that switches an argument on and has another name than the argument."""
    return Flag("on", spelled=spelled)


def off(spelled: str, *only_with: Condition) -> Flag:
    """Return a flag that switches an argument off."""
    return Flag("off", only_with, spelled=spelled)


VALUE = Flag()
ON = Flag("on")


@dataclass(frozen=True)
class BridgeField:
    """A field of Megatron-Bridge's `run_config.yaml` that corresponds to an argument.

    Attributes:
        section: section of the file; fields of `model` are also fields of Megatron Core's configuration.
        name: name of the field; if empty, that of the argument.
        only_with: the field corresponds to the argument only under this condition; None for always.
        is_written: the field is written for a new model.
        only_if_changed: the field is only written if the argument is not neutral; older releases may not have it.
    """

    section: str = "model"
    name: str = ""
    only_with: Condition | None = None
    is_written: bool = True
    only_if_changed: bool = False


def bridge(*only_with: Condition, name: str = "") -> tuple[BridgeField, ...]:
    """Return a field of section `model`, or one for each condition."""
    return tuple(BridgeField(name=name, only_with=condition) for condition in only_with) or (BridgeField(name=name),)


def reads(*places: str) -> tuple[BridgeField, ...]:
    """Return fields that are only read: `section.name`, or `section` if the name is the argument's."""
    parts = [place.partition(".") for place in places]
    return tuple(BridgeField(section, name, is_written=False) for section, _, name in parts)


SAME = bridge()
IF_CHANGED = (BridgeField(only_if_changed=True),)


class PartialArguments:
    """Arguments of a job, each of which may be unknown."""

    def value_of(self, name: str) -> Any:
        """Return an argument by name; None if it is unknown."""
        raise NotImplementedError


class CompleteArguments:
    """Arguments that all have a value, which may be Megatron's None."""

    def value_of(self, name: str) -> Any:
        """Return an argument by name."""
        raise NotImplementedError


@dataclass(eq=False)
class Argument(Generic[T, D]):
    """A row of the table. As an attribute of a job or a model, it is the value of the argument.

    Attributes:
        values: the possible values. The default is the value in jobs whose version does not have the argument
            (megatron/training/arguments.py and TransformerConfig, core_v0.7.0 to 0.19.2).
        effect: effect on the forward pass.
        flag: flag of `pretrain_gpt.py` that sets the argument of a model; None if there is none.
        bridge: fields of Megatron-Bridge that correspond to the argument.
        since: first release of Megatron with the argument; empty if the oldest known release has it.
        until: first release without the argument; empty if the newest release has it.
        is_parsed: the parser of some release has the argument; otherwise only other training loops use it.
        name: name of the argument and of the attribute.
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
        """The value that does not change the forward pass."""
        if isinstance(self.effect, Changes) and self.effect.neutral is not DEFAULT:
            return self.effect.neutral
        return self.values.default

    @property
    def value_without_flag(self) -> Any:
        """The value of the argument without the flag; None if every job must pass the flag."""
        default = self.values.default if self.flag is None or self.flag.without is DEFAULT else self.flag.without
        return None if default is REQUIRED else default

    @property
    def releases(self) -> list[Version]:
        """The known releases whose parser has the argument."""
        first = parse_version(self.since) or OLDEST
        end = parse_version(self.until)
        releases = releases_between(first) if self.is_parsed else []
        return [version for version in releases if end is None or version not in releases_between(end)]


def rows_of(*tables: type) -> dict[str, Argument[Any, Any]]:
    """Return the rows of tables by the names of their arguments."""
    rows = (row for table in tables for row in vars(table).values() if isinstance(row, Argument))
    return {row.name: row for row in rows}
