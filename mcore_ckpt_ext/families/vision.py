"""Describes vision towers: the names of their tensors, and their configuration.

Megatron-Bridge places the vision tower on the first pipeline stage, next to the language model. The supported models
are in `vision_towers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.families.family import HuggingFaceTensor
from mcore_ckpt_ext.families.text_parts import text_config
from mcore_ckpt_ext.families.validation import check_plain
from mcore_ckpt_ext.model_space.anatomy import LANGUAGE_MODEL
from mcore_ckpt_ext.model_space.slices import Region

PREFIX = f"{LANGUAGE_MODEL}."
"""The prefix of the language model's names in Megatron-Bridge."""
_ROPE = ("rope_parameters", "rope_scaling")
_SECTIONS = "mrope_section"
# Of classes in transformers 5.23 (`rope_parameters.get("mrope_section", ...)`) and of the providers of Megatron-Bridge.
_SECTIONS_OF_CLASS = {"qwen2_5_vl": [16, 24, 24], "qwen3_vl": [24, 20, 20], "qwen3_vl_moe": [24, 20, 20]}
_THETA = 10000.0  # RoPE base of vision towers: no class of Megatron-Bridge has another
_NUMBER = "*"
_OF_TEXT = "model."
_PARTS = 3  # queries, keys, values


@dataclass(frozen=True)
class VisionMapping:
    """A tensor in Hugging Face's folders and in Megatron-Bridge.

    `*` stands for the number of a block or merger.

    Attributes:
        theirs: name in Hugging Face's folders, as it is written.
        ours: name in Megatron.
        by_heads: Hugging Face stores all queries, then all keys, then all values; Megatron stores them head by head
            (`ConcatenatedQKVMapping` of Megatron-Bridge; queries and keys have equally many heads).
        transposed: the matrix is transposed in Hugging Face's folders.
    """

    theirs: str
    ours: str
    by_heads: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class VisionTower:
    """The vision tower of a model type.

    Attributes:
        rules: rules for all tensors of the vision tower.
        spellings: patterns of prefixes in published folders, and the prefixes that are written.
        text: prefix of the language model's names in a folder; as a model of its own it has `model.`.
        provider: class of the whole model, below `megatron.bridge.models`.
        config_class: configuration class of the vision tower in transformers.
        fields: fields of the provider by the keys of `config.json`.
        sizes: for each key of `vision_config`, a pattern of names and an axis. The value is the size of a matching
            tensor along the axis, or the number of matching names if the axis is None. For a list, its length is
            compared.
        heads: key of `vision_config` with the number of heads, if rows are stored head by head.
        fixed: keys of `vision_config` whose value is fixed in the provider.
        axes: positions have three axes.
        experts: the language model has experts.
        states: patterns of modules with an extra state, and whether the state is Transformer Engine's.
        further: returns further fields of the provider, given the `config.json`.
        unlike: yields further contradictions between a `config.json` and shapes in Megatron.
    """

    rules: Sequence[VisionMapping]
    spellings: Sequence[tuple[str, str]]
    text: str
    provider: str
    config_class: str
    fields: Mapping[str, str]
    sizes: Mapping[str, tuple[str, int | None]]
    heads: str | None = None
    fixed: Mapping[str, Any] | None = None
    axes: bool = True
    experts: bool = False
    states: Sequence[tuple[str, bool]] = ()
    further: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    unlike: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], Iterator[str]] | None = None

    def ours(self, name: str) -> str | None:
        """Return the name in Megatron of a tensor of a Hugging Face folder; None if Megatron lacks it."""
        name = self.published_name(name)
        return next(
            (translated for rule in self.rules if (translated := _translate(name, rule.theirs, rule.ours))), None
        )

    def published_name(self, name: str) -> str:
        """Return the name that is written for a name in a published folder."""
        for pattern, written in self.spellings:
            name = re.sub(pattern, written, name)
        return name

    def tensor(self, ours: str, shape: tuple[int, ...], vision: Mapping[str, Any]) -> HuggingFaceTensor:
        """Return the tensor of a written folder for a Megatron tensor.

        Args:
            ours: name in Megatron, which a rule maps.
            shape: shape of the whole tensor in Megatron.
            vision: the `vision_config`.

        Raises:
            UnsupportedCheckpointError: the number of rows is not a multiple of the number of heads.
        """
        named = ((rule, _translate(ours, rule.ours, rule.theirs)) for rule in self.rules)
        rule, theirs = next((rule, name) for rule, name in named if name)
        regions: tuple[Region, ...] = (Region.whole(ours, shape),)
        if rule.by_heads:
            regions = tuple(_regions_by_heads(ours, shape, vision.get(str(self.heads))))
        return HuggingFaceTensor(theirs, shape[::-1] if rule.transposed else shape, regions, rule.transposed)

    def megatron_shape(self, ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Convert the shape of a tensor in a folder to its shape in Megatron."""
        rule = next(rule for rule in self.rules if _translate(ours, rule.ours, rule.ours))
        return shape[::-1] if rule.transposed else shape

    def folder_name(self, name: str) -> str:
        """Return the name of a language model's tensor in a folder of the whole model."""
        return self.text + name.removeprefix(_OF_TEXT) if name.startswith(_OF_TEXT) else name

    def holds(self, names: Collection[str]) -> bool:
        """Return whether all names are those of this vision tower in Megatron."""
        return all(any(_translate(name, rule.ours, rule.ours) for rule in self.rules) for name in names)

    def provider_fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields in section `model` of `run_config.yaml` for the whole model.

        Raises:
            UnsupportedCheckpointError: the `config.json` lacks a key, or has an unsupported value.
        """
        vision = config.get("vision_config")
        section = sections_of(config) if self.axes else None
        if not isinstance(vision, Mapping) or (self.axes and section is None):
            lacking = (
                f"{_SECTIONS} in rope_parameters or rope_scaling" if isinstance(vision, Mapping) else "vision_config"
            )
            raise UnsupportedCheckpointError("config.json lacks a key", expected=lacking, where="config.json")
        self._check_fixed(vision)
        plain = {key: value for key, value in vision.items() if key not in _ROPE and not isinstance(value, Mapping)}
        copied = {name: config[key] for key, name in self.fields.items() if key in config}
        check_plain({**plain, **copied, _SECTIONS: section})
        axes = {"position_embedding_type": "mrope", _SECTIONS: section} if self.axes else {}
        return {
            **copied,
            **axes,
            "_target_": f"megatron.bridge.models.{self.provider}",
            "scatter_embedding_sequence_parallel": False,
            "vision_config": {**plain, "_target_": f"transformers.models.{self.config_class}"},
            **(self.further(config) if self.further else {}),
        }

    def _check_fixed(self, vision: Mapping[str, Any]) -> None:
        rope: Mapping[str, Any] = next((vision[key] for key in _ROPE if isinstance(vision.get(key), Mapping)), {})
        wrong = [
            f"{key}: {vision[key]}" for key, value in (self.fixed or {}).items() if vision.get(key, value) != value
        ]
        if rope.get("rope_theta", _THETA) != _THETA:
            wrong.append(f"rope_theta: {rope['rope_theta']}")
        if wrong:
            raise UnsupportedCheckpointError(
                "Megatron-Bridge has no such model",
                found=", ".join(wrong),
                expected="what released models have",
                where="config.json, vision_config",
            )

    def mismatches(self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return contradictions between a `config.json` and the shapes of the vision tower in Megatron."""
        vision = config.get("vision_config") or {}
        reasons = [f"no {name}" for name in self._expected_names(shapes) if name not in shapes]
        for key, (pattern, axis) in self.sizes.items():
            matches = {match[0]: shape for name, shape in shapes.items() if (match := re.match(pattern, name))}
            sizes = (shape[axis] for shape in matches.values() if axis is not None and axis < len(shape))
            size = len(matches) if axis is None else next(sizes, None)
            value = vision.get(key)
            if (len(value) if isinstance(value, (list, tuple)) else value) != size:
                reasons.append(f"{key} is {value} in vision_config, and {size} by the tensors")
        section = sections_of(config)
        head = _head_size(config)
        if self.axes and head is not None and 2 * sum(section or ()) != head:
            reasons.append(f"{_SECTIONS} is {section}, and heads have {quantity(head, 'element')}")
        return reasons if reasons or self.unlike is None else [*self.unlike(vision, shapes)]

    def _expected_names(self, names: Collection[str]) -> Iterator[str]:
        """Yield all names of the vision tower, with as many blocks and mergers as the given names have."""
        numbers: dict[str, set[str]] = {}
        for rule in self.rules:
            pattern = _pattern(rule.ours)
            matches = filter(None, map(pattern.fullmatch, names)) if _NUMBER in rule.ours else ()
            numbers.setdefault(rule.ours.partition(_NUMBER)[0], set()).update(match[1] for match in matches)
        for rule in self.rules:
            before, number, _ = rule.ours.partition(_NUMBER)
            count = len(numbers[before]) if number else 1
            yield from (rule.ours.replace(_NUMBER, str(at)) for at in range(count))

    def states_of(self, names: Collection[str]) -> dict[str, bool]:
        """Return the modules with an extra state, and whether the state is Transformer Engine's."""
        modules = {name.rpartition(".")[0] for name in names}
        return {
            module: engine
            for module in sorted(modules)
            for pattern, engine in self.states
            if re.fullmatch(pattern, module)
        }


def sections_of(config: Mapping[str, Any]) -> Any:
    """Return the number of frequencies for each axis of positions in images.

    Returns:
        That of the class if `config.json` has none; None if the class has none, either.
    """
    inside = config.get("text_config")
    for part in (inside if isinstance(inside, Mapping) else {}, config):
        for key in _ROPE:
            if isinstance(part.get(key), Mapping) and part[key].get(_SECTIONS) is not None:
                return part[key][_SECTIONS]
    return _SECTIONS_OF_CLASS.get(str(config.get("model_type")))


def _head_size(config: Mapping[str, Any]) -> int | None:
    """Return the head size of the language model; None if it is unknown."""
    text = text_config(config) or {}
    head, hidden, heads = (text.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if type(head) is int:
        return head
    return hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(re.escape(_NUMBER), r"(\d+)"))


def _translate(name: str, source: str, target: str) -> str | None:
    """Translate a name from one template of a rule to the other; None if it does not match."""
    match = _pattern(source).fullmatch(name)
    return match and target.replace(_NUMBER, match[1] if _NUMBER in source else "")


def _regions_by_heads(name: str, shape: tuple[int, ...], heads: Any) -> Iterator[Region]:
    """Yield the rows of all queries, all keys, all values of a parameter that stores them head by head."""
    if type(heads) is not int or heads < 1 or shape[0] % (_PARTS * heads):
        raise UnsupportedCheckpointError(
            "the rows of a parameter do not match the number of heads",
            found=f"{quantity(shape[0], 'row')}, {quantity(heads, 'head')}",
            where=name,
        )
    rows = shape[0] // (_PARTS * heads)
    for part in range(_PARTS):
        for head in range(heads):
            start = (_PARTS * head + part) * rows
            yield Region(name, (start, *(0 for _ in shape[1:])), (rows, *shape[1:]))
