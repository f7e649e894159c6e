"""Finds arguments that change the forward pass and that a family of models does not express.

The table of arguments (`job/arguments`) has the effect of each on the forward pass. A family expresses some arguments
(`Setting.expresses`); every other argument must have its neutral value, or the checkpoint does not belong to the
family. A test requires a row for every argument of the installed parser.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mcore_ckpt_ext.errors import escape, format_value, join_some, shorten
from mcore_ckpt_ext.job.arguments.row import SHAPES, Alias, AnyBut, Changes, Condition, Noted, Without
from mcore_ckpt_ext.job.arguments.table import ROWS
from mcore_ckpt_ext.job.arguments.without_effect import arguments_without_effect
from mcore_ckpt_ext.job.model_arguments import ModelArguments

SIZES = frozenset(name for name, row in ROWS.items() if row.effect is SHAPES)
"""Arguments that every family expresses, by shapes or by settings."""
ALIASES: Mapping[str, str] = {name: row.effect.of for name, row in ROWS.items() if isinstance(row.effect, Alias)}
"""Other names of arguments: in older releases, and in the parser if they differ from the configuration."""
NEUTRAL: Mapping[str, Any] = {
    name: row.neutral for name, row in ROWS.items() if isinstance(row.effect, Changes) and not row.effect.only_with
}
"""Arguments that change the forward pass, with their neutral value."""
NOTED: Mapping[str, Noted] = {name: row.effect for name, row in ROWS.items() if isinstance(row.effect, Noted)}
"""Arguments that Hugging Face cannot express but that do not concern the weights, with a notice for each."""


def _only_with() -> dict[Condition | Without, dict[str, Any]]:
    by_condition: dict[Condition | Without, dict[str, Any]] = {}
    for name, row in ROWS.items():
        for condition in row.effect.only_with if isinstance(row.effect, Changes) else ():
            by_condition.setdefault(condition, {})[name] = row.neutral
    return by_condition


ONLY_WITH: Mapping[Condition | Without, Mapping[str, Any]] = _only_with()
"""Arguments that only have an effect under a condition, with their neutral values."""

_UNKNOWN = object()


def classified_arguments(names: Collection[str]) -> set[str]:
    """Return the arguments with a known effect."""
    return arguments_without_effect(names) | (set(names) & ROWS.keys())


def unexpressed_arguments(expressed: Collection[str], arguments: ModelArguments) -> list[str]:
    """Return descriptions of arguments that change the forward pass and that a family does not express.

    Args:
        expressed: the arguments that the family's settings map.
        arguments: arguments of the model.
    """
    descriptions = [
        f"{name} is {shorten(repr(arguments.get(name)))}, for which it has no key"
        for name, neutral in _effective_arguments(arguments)
        if name not in expressed and not _is_neutral(arguments.get(name, _UNKNOWN), neutral)
    ]
    return list(dict.fromkeys(descriptions))


def differing_arguments(a: ModelArguments, b: ModelArguments) -> dict[str, tuple[Any, Any]]:
    """Return the arguments that change the forward pass and that two jobs set differently."""
    differences: dict[str, tuple[Any, Any]] = {}
    for name in ("layernorm_epsilon", *dict(_effective_arguments(a)).keys() & dict(_effective_arguments(b)).keys()):
        values = a.get(name, _UNKNOWN), b.get(name, _UNKNOWN)
        plain = [list(value) if isinstance(value, tuple) else value or None for value in values]
        if name == "add_qkv_bias" and a.add_bias_linear and b.add_bias_linear:
            continue  # `add_bias_linear` includes this bias
        if _UNKNOWN not in values and plain[0] != plain[1]:
            differences[name] = values
    return dict(sorted(differences.items()))


def notes_on(arguments: ModelArguments) -> list[str]:
    """Return notices about arguments of the job that the Hugging Face model cannot express."""
    return [
        f"--{name.replace('_', '-')} {value}: {effect.why}"
        for name, effect in NOTED.items()
        if (value := arguments.get(name)) and value not in effect.without
    ]


_OWN_MARKS = "mcore_ckpt_ext_"  # arguments that this package adds to the checkpoints that it writes


def unknown(arguments: ModelArguments) -> list[str]:
    """Return a notice about arguments of the job that no known release of Megatron has."""
    raw = arguments.job.raw
    known_names = classified_arguments(raw)
    named = {name: value for name, value in raw.items() if name not in known_names and not name.startswith(_OWN_MARKS)}
    set_ones = [name for name, value in named.items() if isinstance(value, (int, float, str, list, dict)) and value]
    if not set_ones:
        return []
    listed = join_some([f"{escape(name)} {format_value(named[name])}" for name in set_ones])
    return [f"unknown arguments, which must not change what the model computes: {listed}"]


def _effective_arguments(arguments: ModelArguments) -> Iterator[tuple[str, Any]]:
    """Yield the arguments that have an effect in a job, with their neutral values."""
    yield from NEUTRAL.items()
    for condition, dependent in ONLY_WITH.items():
        if condition.holds(arguments.get):
            yield from dependent.items()


def _is_neutral(argument: Any, neutral: Any) -> bool:
    if isinstance(neutral, AnyBut):
        several = argument if isinstance(argument, (list, tuple)) else [argument]
        return not any(entry in neutral.others for entry in several)
    return argument is _UNKNOWN or (argument or None) == (neutral or None)
