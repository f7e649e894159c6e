"""Compares the settings that a resume restores, apart from tensors, between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, format_value, join_some, quantity
from mcore_ckpt_ext.formats.common_state import scheduler_in
from mcore_ckpt_ext.formats.portable_state import portable_group
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.lazy_torch import is_tensor
from mcore_ckpt_ext.optimizers.groups import OF_THE_JOB, strip_prefix, with_defaults
from mcore_ckpt_ext.storage.json_tree import encode

_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
_ABSENT = "none"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that a resume restores.

    Attributes:
        name: its name.
        a: its value in A, as text.
        b: its value in B, as text.
        equal: whether both values have the same effect.
    """

    name: str
    a: str
    b: str
    equal: bool


def settings_compared(a: CheckpointView, b: CheckpointView) -> tuple[Setting, ...]:
    """Return the settings of two checkpoints that a resume restores.

    Returns:
        The settings; empty if one checkpoint has no optimizer: weights alone are loaded without settings.
    """
    if a.optimizer.format() is None or b.optimizer.format() is None:
        return ()
    settings = [_setting("iteration", a.job.iteration(), b.job.iteration())]
    settings += _settings_of_groups(_groups(a), _groups(b))
    settings += _settings_of_mappings(
        "scheduler", *(_mapping(scheduler_in(checkpoint.job.common())) for checkpoint in (a, b))
    )
    settings += _settings_of_mappings(
        "grad scaler", *(_mapping(checkpoint.optimizer.grad_scaler()) for checkpoint in (a, b))
    )
    for name in _COUNTERS:
        if name in a.job.args and name in b.job.args:
            settings.append(_setting(name.replace("_", " "), a.job.args[name], b.job.args[name]))
    return (*settings, *_settings_of_random_states(a, b))


def _setting(name: str, a: Any, b: Any) -> Setting:
    return Setting(name, _text(a), _text(b), _plain(a) == _plain(b))


def _plain(value: Any) -> Any:
    """Normalize a value for comparison: a tensor of one element is a number, a tuple is a list."""
    if is_tensor(value) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(element) for element in value]
    if isinstance(value, (bool, int, float)):
        return repr(float(value))  # NaNs are equal
    return value if isinstance(value, (str, type(None))) else repr(encode(value))


def _text(value: Any) -> str:
    if is_tensor(value) and value.numel() == 1:
        value = value.item()
    return _ABSENT if value is None else format_value(value)


def _groups(checkpoint: CheckpointView) -> list[dict[str, Any]]:
    """Return the settings of each group, with defaults for settings that a writer leaves out.

    Adam's groups of a HybridDeviceOptimizer have a step on some ranks only; it is the same for all.
    """
    stored = [portable_group(group) for group in checkpoint.optimizer.param_groups()]
    steps = {repr(_plain(group["step"])): {"step": group["step"]} for group in stored if group.get("step") is not None}
    step = next(iter(steps.values())) if len(steps) == 1 else {}
    groups = [strip_prefix({key: value for key, value in group.items() if value is not None}) for group in stored]
    return [
        {key: value for key, value in {**step, **group}.items() if key not in OF_THE_JOB}
        for group in with_defaults(groups)
    ]


def _settings_of_groups(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> Iterator[Setting]:
    """Yield a setting for each key, and one for the groups if only the combinations of values differ."""
    keys = sorted({key for group in (*a, *b) for key in group})
    all_equal = True
    for key in keys:
        values = [_distinct([group.get(key) for group in groups]) for groups in (a, b)]
        equal = values[0].keys() == values[1].keys()
        all_equal = all_equal and equal
        texts = [", ".join(texts_of_side.values()) for texts_of_side in values]
        yield Setting(key, texts[0], texts[1], equal)
    made_up = [{repr(sorted((key, _plain(group.get(key))) for key in keys)) for group in groups} for groups in (a, b)]
    if all_equal:
        texts = [quantity(len(groups), "different group") for groups in made_up]
        yield Setting("parameter groups", texts[0], texts[1], made_up[0] == made_up[1])


def _distinct(values: Sequence[Any]) -> dict[str, str]:
    texts = {repr(_plain(value)): _text(value) for value in values}
    return dict(sorted(texts.items()))


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None if value is None else {"": value}


def _settings_of_mappings(name: str, a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> Iterator[Setting]:
    if a is None or b is None:
        if a is not b:
            texts = [_ABSENT if mapping is None else quantity(len(mapping), "entry", "entries") for mapping in (a, b)]
            yield Setting(name, texts[0], texts[1], equal=False)
        return
    for key in sorted({*map(str, a), *map(str, b)}):
        yield _setting(f"{name}: {key}" if key else name, a.get(key), b.get(key))


def _settings_of_random_states(a: CheckpointView, b: CheckpointView) -> Iterator[Setting]:
    """Yield the random generators' states, if both checkpoints have them for the same ranks."""
    with suppress(UnreadableCheckpointError):
        states = [
            {place: repr(encode(state)) for place, state in checkpoint.states.random().items()} for checkpoint in (a, b)
        ]
        if states[0] and states[0].keys() == states[1].keys():
            differing = [str(place) for place in states[0] if states[0][place] != states[1][place]]
            text = f"of {quantity(len(states[0]), 'rank')}"
            other = f"others at {join_some(differing)}" if differing else text
            yield Setting("random states", text, other, not differing)
