"""Interprets `adapter_config.json` as peft does: which linear layers have adapters, of which rank.

Sources: `LoraConfig` (tuners/lora/config.py), `_create_and_replace` (tuners/lora/model.py),
`check_target_module_exists` (tuners/tuners_utils.py) and `get_pattern_key` (utils/other.py); peft 0.21.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from mcore_ckpt_ext.families.adapters import MAGNITUDES, PREFIX, Shapes
from mcore_ckpt_ext.job.arguments.kinds import is_whole
from mcore_ckpt_ext.storage.patterns import is_pattern, match_pattern

_RANK = 8  # peft's default for `r`
_INTO = ".lora_A.weight"


def strange_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with values of a wrong type, or that contradict other keys or a causal language model."""
    strange = {key: config.get(key) for key, is_one in _KINDS.items() if not is_one(config.get(key))}
    if isinstance(config.get("target_modules"), str):
        keys = ("layers_to_transform", "layers_pattern")
        strange |= {key: config[key] for key in keys if config.get(key) is not None}
    if config.get("layers_pattern") and config.get("layers_to_transform") is None:
        strange["layers_pattern"] = config["layers_pattern"]
    return strange


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
    ranks = (rank for pattern, rank in patterns.items() if match_pattern(rf"(.*\.)?({pattern})$", module) is not None)
    default: int = config.get("r", _RANK)
    return next(ranks, default)


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
        return match_pattern(names, module, whole=True) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _is_in_layers(config: Mapping[str, Any], module: str) -> bool:
    layers = config.get("layers_to_transform")
    patterns = config.get("layers_pattern") or []
    if layers is None or layers == []:
        return True
    several_patterns = [patterns] if isinstance(patterns, str) else patterns
    begins = [rf"(?:^|.*?\.){pattern}" for pattern in several_patterns] or [r".*?\.[^.]*"]
    tried = (match_pattern(rf"{begin}\.(?P<index>\d+)\.", module) for begin in begins)
    first_match = next((groups for groups in tried if groups is not None), None)
    return first_match is not None and int(first_match["index"]) in ([layers] if isinstance(layers, int) else layers)


_IsOne = Callable[[object], bool]


def _optional(*kinds: _IsOne) -> _IsOne:
    return lambda value: value is None or any(is_one(value) for is_one in kinds)


def _list_of(is_one: _IsOne) -> _IsOne:
    return lambda value: isinstance(value, list) and all(map(is_one, value))


def _are_ranks(value: object) -> bool:
    return isinstance(value, dict) and all(is_pattern(key) and is_whole(rank) for key, rank in value.items())


_ARE_NAMES = _list_of(lambda value: isinstance(value, str))
_IS_SWITCH = _optional(lambda value: isinstance(value, bool))
_KINDS: Mapping[str, _IsOne] = {
    # Required, because the default depends on the version of peft.
    "target_modules": lambda value: is_pattern(value) or _ARE_NAMES(value),
    "exclude_modules": _optional(is_pattern, _ARE_NAMES),
    "layers_to_transform": _optional(is_whole, _list_of(is_whole)),
    "layers_pattern": _optional(is_pattern, _list_of(is_pattern)),
    "r": _optional(is_whole),
    "rank_pattern": _optional(_are_ranks),
    "use_rslora": _IS_SWITCH,
    "use_dora": _IS_SWITCH,
    "task_type": lambda value: value in (None, "CAUSAL_LM"),
}
