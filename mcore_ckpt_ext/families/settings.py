"""Settings that convert between `config.json` and Megatron's arguments, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.config_checks import (
    MOST_COUNTED,
    Config,
    checked_size,
    mismatches,
    null_value,
    unrepresentable,
)
from mcore_ckpt_ext.job.model_arguments import ModelArguments


class Setting:
    """A setting of a model in both configurations.

    Attributes:
        keys: the keys of `config.json` that it maps.
        expresses: the arguments that it maps; `mismatches` reports values that the family does not support.
    """

    keys: Sequence[str] = ()
    expresses: Collection[str] = ()

    def config(self, arguments: ModelArguments) -> dict[str, Any]:
        """Return the keys for a model's arguments."""
        return {}

    def arguments(self, config: Config) -> dict[str, Any]:
        """Return the arguments for a `config.json`.

        Raises:
            UnsupportedCheckpointError: Megatron has no arguments for a value.
        """
        return {}

    def mismatches(self, arguments: ModelArguments) -> list[str]:
        """Return the reasons why arguments do not match the setting; empty if they do."""
        return []


@dataclass
class Mapped(Setting):
    """A value that both configurations have; `default` is that of Hugging Face's class for a missing key."""

    key: str
    argument: str
    default: Any = None

    def __post_init__(self) -> None:
        self.keys = (self.key,)
        self.expresses = (self.argument,)

    @override
    def config(self, arguments: ModelArguments) -> dict[str, Any]:
        return {self.key: arguments.value(self.argument)}

    @override
    def mismatches(self, arguments: ModelArguments) -> list[str]:
        unset = self.default is not None and arguments.value(self.argument) is None
        return [f"{self.argument} is None, for which it has no key"] if unset else []

    @override
    def arguments(self, config: Config) -> dict[str, Any]:
        value = config.get(self.key, self.default)
        if value is None and self.default is None and self.key not in config:
            raise UnsupportedCheckpointError("config.json lacks a key", expected=self.key)
        if value is None and self.default is not None:
            raise null_value(self.key, self.default)
        return {self.argument: value}


@dataclass
class Coefficient(Mapped):
    """The coefficient of the load-balancing loss; transformers has only the first of Megatron's several."""

    @override
    def config(self, arguments: ModelArguments) -> dict[str, Any]:
        value = arguments.value(self.argument)
        return {self.key: value[0] if isinstance(value, (list, tuple)) else value}


@dataclass
class Nullable(Mapped):
    """A value that both configurations have, and that may be null in both."""

    @override
    def config(self, arguments: ModelArguments) -> dict[str, Any]:
        return {self.key: arguments.get(self.argument)}

    @override
    def mismatches(self, arguments: ModelArguments) -> list[str]:
        return []

    @override
    def arguments(self, config: Config) -> dict[str, Any]:
        return {self.argument: config.get(self.key, self.default)}


@dataclass
class Size(Mapped):
    """An integer that both configurations have; `counted` for numbers of layers, heads or experts."""

    counted: bool = False

    @override
    def config(self, arguments: ModelArguments) -> dict[str, Any]:
        return {self.key: arguments.require(self.argument)}

    @override
    def arguments(self, config: Config) -> dict[str, Any]:
        arguments = super().arguments(config)
        checked_size(self.key, arguments[self.argument], MOST_COUNTED if self.counted else 1 << 40)
        return arguments


@dataclass
class Constant(Setting):
    """A key with the same value in all models of a family, and the arguments for it (`needed`).

    A missing or null key counts as `value`, unless `value` is True; so do the `synonyms` of the value.
    """

    key: str
    value: Any
    needed: Mapping[str, Any]
    synonyms: Collection[Any] = ()

    def __post_init__(self) -> None:
        self.keys = (self.key,)
        self.expresses = self.needed.keys()

    @override
    def config(self, arguments: ModelArguments) -> dict[str, Any]:
        return {self.key: self.value}

    @override
    def arguments(self, config: Config) -> dict[str, Any]:
        configured = config.get(self.key, self.value)
        if configured in (self.value, *self.synonyms) or (configured is None and self.value is not True):
            return dict(self.needed)
        raise unrepresentable(self.key, configured, f"{self.value}")

    @override
    def mismatches(self, arguments: ModelArguments) -> list[str]:
        return mismatches(self.needed, arguments)


class Forbidden(Setting):
    """Keys that must be false or missing, because their feature is not supported; never written.

    Keys by name have the reason as their value, which the error repeats.
    """

    def __init__(self, *keys: str, **reasons: str) -> None:
        self._reasons = {**dict.fromkeys(keys, ""), **reasons}
        self.keys = [*self._reasons]

    @override
    def arguments(self, config: Config) -> dict[str, Any]:
        for key, reason in self._reasons.items():
            if value := config.get(key):
                raise unrepresentable(key, f"{value}: {reason}" if reason else value, "False")
        return {}


@dataclass
class Neutral(Setting):
    """Keys of published folders that must be missing or have a neutral value; never written."""

    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.keys = [*self.values]

    @override
    def arguments(self, config: Config) -> dict[str, Any]:
        for key, value in self.values.items():
            if config.get(key, value) != value:
                raise unrepresentable(key, config[key], f"{value}")
        return {}


class CheckedKeys(Setting):
    """Keys that a function checks when a folder is read; never written."""

    def __init__(self, *keys: str, check: Callable[[Config], None]) -> None:
        self.keys = keys
        self._check = check

    @override
    def arguments(self, config: Config) -> dict[str, Any]:
        self._check(config)
        return {}


@dataclass
class Excludes(Setting):
    """Models that the family does not have; `why_not` returns the reasons, given the arguments."""

    why_not: Callable[[ModelArguments], list[str]]

    @override
    def mismatches(self, arguments: ModelArguments) -> list[str]:
        return self.why_not(arguments)


@dataclass
class Implies(Setting):
    """Arguments with which models of the family are trained, but that other values do not contradict."""

    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.expresses = self.values.keys()

    @override
    def arguments(self, config: Config) -> dict[str, Any]:
        return dict(self.values)


@dataclass
class Requires(Implies):
    """Arguments with the same value in all models of a family, without a key in `config.json`."""

    @override
    def mismatches(self, arguments: ModelArguments) -> list[str]:
        return mismatches(self.values, arguments)


@dataclass
class Custom(Setting):
    """A setting by functions: keys, two conversions, and optionally reasons why arguments do not match.

    `expressed`: the arguments that the functions use, except sizes.
    """

    explained: Sequence[str]
    to_config: Callable[[ModelArguments], dict[str, Any]]
    to_arguments: Callable[[Config], dict[str, Any]]
    why_not: Callable[[ModelArguments], list[str]] = lambda arguments: []
    expressed: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.keys = self.explained
        self.expresses = self.expressed

    @override
    def config(self, arguments: ModelArguments) -> dict[str, Any]:
        return self.to_config(arguments)

    @override
    def arguments(self, config: Config) -> dict[str, Any]:
        return self.to_arguments(config)

    @override
    def mismatches(self, arguments: ModelArguments) -> list[str]:
        return self.why_not(arguments)
