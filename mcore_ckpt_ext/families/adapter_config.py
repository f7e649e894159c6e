"""Interprets `adapter_config.json` as peft does: which linear layers have adapters, of which rank.

Sources: `LoraConfig` (tuners/lora/config.py), `_create_and_replace` (tuners/lora/model.py),
`check_target_module_exists` (tuners/tuners_utils.py) and `get_pattern_key` (utils/other.py); peft 0.21.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from mcore_ckpt_ext.families.adapters import MAGNITUDES, PREFIX, Shapes
from mcore_ckpt_ext.storage.patterns import is_pattern, matched

_RANK = 8  # peft's default for `r`
_INTO = ".lora_A.weight"


def strange_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with values of a wrong type, or that contradict other keys or a causal language model."""
    found = {key: config.get(key) for key, is_one in _KINDS.items() if not is_one(config.get(key))}
    if isinstance(config.get("target_modules"), str):
        keys = ("layers_to_transform", "layers_pattern")
        found |= {key: config[key] for key in keys if config.get(key) is not None}
    if config.get("layers_pattern") and config.get("layers_to_transform") is None:
        found["layers_pattern"] = config["layers_pattern"]
    return found


def contradictions(config: Mapping[str, Any], shapes: Shapes, linears: Collection[str]) -> Iterator[str]:
    """Yield differences between the tensors of a folder and its configuration.

    Args:
        config: the configuration, without the values of `strange_values`.
        shapes: shapes of the folder's tensors by their names in PEFT.
        linears: names of the model's linear layers that can have adapters.

    Raises:
        UnsupportedCheckpointError: matching a pattern takes too long.
    """
    ranks = {name[len(PREFIX) : -len(_INTO)]: shape[0] for name, shape in shapes.items() if name.endswith(_INTO)}
    with_norms = bool(config.get("use_dora"))
    for module, rank in ranks.items():
        if rank != (expected := _rank_of(config, module)):
            yield f"rank {expected} in r or rank_pattern, {rank} of {module}"
        if (f"{PREFIX}{module}.{MAGNITUDES}" in shapes) is not with_norms:
            yield f"use_dora: {with_norms}, {'no' if with_norms else 'a'} {MAGNITUDES} of {module}"
        if not _is_targeted(config, module):
            yield f"not in target_modules: {module}"
    for module in linears:
        if module not in ranks and _is_targeted(config, module):
            yield f"in target_modules, and without an adapter: {module}"


def _rank_of(config: Mapping[str, Any], module: str) -> int:
    patterns: Mapping[str, int] = config.get("rank_pattern") or {}
    found = (rank for pattern, rank in patterns.items() if matched(rf"(.*\.)?({pattern})$", module) is not None)
    default: int = config.get("r", _RANK)
    return next(found, default)


def _is_targeted(config: Mapping[str, Any], module: str) -> bool:
    targets = config["target_modules"]
    if _is_named(config.get("exclude_modules") or [], module):
        return False
    if isinstance(targets, str):  # "all-linear" excludes the output layer, whose adapters are not supported
        return targets.lower() == "all-linear" or _is_named(targets, module)
    return module in targets or (_is_named(targets, module) and _is_in_layers(config, module))


def _is_named(names: str | list[str], module: str) -> bool:
    """Return whether a pattern matches a module, or its name ends with one of the names."""
    if isinstance(names, str):
        return matched(names, module, whole=True) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _is_in_layers(config: Mapping[str, Any], module: str) -> bool:
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern") or []
    if layers is None or layers == []:
        return True
    own = [patterns] if isinstance(patterns, str) else patterns
    begins = [rf"(?:^|.*?\.){pattern}" for pattern in own] or [r".*?\.[^.]*"]
    tried = (matched(rf"{begin}\.(?P<index>\d+)\.", module) for begin in begins)
    found = next((groups for groups in tried if groups is not None), None)
    return found is not None and int(found["index"]) in ([layers] if isinstance(layers, int) else layers)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are(is_one: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(is_one, value))


def _any_of(*kinds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: any(is_one(value) for is_one in kinds)


def _is_none(value: object) -> bool:
    return value is None


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _is_switch(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _are_ranks(value: object) -> bool:
    return isinstance(value, dict) and all(is_pattern(key) and _is_count(rank) for key, rank in value.items())


_NAMES = _any_of(is_pattern, _are(_is_name))
_KINDS: Mapping[str, Callable[[object], bool]] = {
    "target_modules": _NAMES,  # required, because the default depends on the version of peft
    "exclude_modules": _any_of(_is_none, _NAMES),
    "layers_to_transform": _any_of(_is_none, _is_count, _are(_is_count)),
    "layers_pattern": _any_of(_is_none, is_pattern, _are(is_pattern)),
    "r": _any_of(_is_none, _is_count),
    "rank_pattern": _any_of(_is_none, _are_ranks),
    "use_rslora": _is_switch,
    "use_dora": _is_switch,
    "task_type": lambda value: value in (None, "CAUSAL_LM"),
}
