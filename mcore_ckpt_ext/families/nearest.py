"""The error for a model of an unknown family, with its unsupported traits and the nearest families.

Families are compared by names alone, so the error suggests none of them: Helium has Llama's keys and tensors, and
rotates interleaved pairs (transformers/models/helium/modeling_helium.py, 5.23).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, join_some
from mcore_ckpt_ext.families.config_keys import MOST_LISTED, WITHOUT_EFFECT
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.rules import Rule, names_matching
from mcore_ckpt_ext.families.text_parts import text_names, text_section
from mcore_ckpt_ext.families.unsupported import (
    ALIBI,
    CLIPPED,
    CROSS_ATTENTION,
    ENCODER,
    FACTORS,
    MAMBA_1,
    NORMS_BEHIND,
    PARALLEL_BLOCKS,
)

_NEAREST = 3
_OPTIONAL = "mtp."  # parameters of multi-token prediction layers, which most folders lack
_HINT = (
    "equal names do not mean equal arithmetic; map the model by a family of its own (python -m pydoc "
    "mcore_ckpt_ext.families.family): --family path.py:Name"
)
_HINT_FOR_TEXT = "save its language model, with the output layer, as a folder of its own, and convert that"
_LAYER = re.compile(r"(^|\.)(layers|h|blocks|block)\.#\.")
_OF_HEADS = re.compile(r"(q|k|query|key|q_a|kv_a|value|v)_?(layer)?_?norm|inner_attn|(attn|attention|mixer)\.norm")


@dataclass(frozen=True)
class Nearest:
    """A family, and the keys of `config.json` and tensors that it does not map (`#` is any number)."""

    family: Family
    keys: Sequence[str]
    tensors: Sequence[str]

    def __str__(self) -> str:
        """Describe the family for messages."""
        unmapped = [
            f"{join_some(names, MOST_LISTED)} ({kind})"
            for names, kind in ((self.keys, "keys"), (self.tensors, "tensors"))
            if names
        ]
        return f"{self.family.name}, except {' and '.join(unmapped)}" if unmapped else f"{self.family.name}, by names"


def unknown_family(
    config: Mapping[str, Any], names: Collection[str], families: Iterable[Family], where: str
) -> UnsupportedCheckpointError:
    """Return the error for a `model_type` without a family.

    Args:
        config: the `config.json` of the model; if it has a `text_config`, that one is compared.
        names: names of its tensors; empty if they cannot be read.
        families: the known families.
        where: path of the file, for the message.
    """
    section = text_section(config)
    text = section or config
    names = [name for name in text_names(names).values() if name is not None]
    nearest = nearest_families(text, names, families)
    traits = deciding_traits(text, names)
    unsupported = f"; what Megatron Core cannot build: {'; '.join(traits)}" if traits else ""
    return UnsupportedCheckpointError(
        "unknown model family",
        found=f"model_type {config.get('model_type')}; nearest: {'; '.join(map(str, nearest))}{unsupported}",
        expected="one of mcore-ckpt convert --list-families",
        where=where,
        hint=_HINT_FOR_TEXT if section else _HINT,
    )


def nearest_families(config: Mapping[str, Any], names: Collection[str], families: Iterable[Family]) -> list[Nearest]:
    """Return the families that map most keys of a `config.json` and most tensors, the nearest first."""
    present = {key for key, value in config.items() if value is not None} - WITHOUT_EFFECT
    kinds = _kinds(names)
    ranked = []
    for family in families:
        keys = sorted(present - family.mapped_keys)
        tensors = sorted(_unexplained_kinds(kinds, family))
        absent = {key for setting in family.settings for key in setting.keys} - config.keys()
        required = _kinds_of(rule for rule in family.rules if not rule.megatron.startswith(_OPTIONAL))
        without = required - kinds if kinds else set()
        ranked.append((len(keys) + len(tensors) + len(without), len(absent), Nearest(family, keys, tensors)))
    ranked.sort(key=lambda entry: entry[:2])
    return [nearest for _, _, nearest in ranked[:_NEAREST]]


def _kinds(names: Collection[str]) -> set[str]:
    """Return names with every number replaced by `#`."""
    return {re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name) for name in names}


def _kinds_of(rules: Iterable[Rule]) -> set[str]:
    return {re.sub(r"\{\w+\}", "#", rule.hugging_face) for rule in rules}


def _unexplained_kinds(kinds: Collection[str], family: Family) -> set[str]:
    explained = _kinds_of((*family.rules, *family.repeated, *family.read_rules))
    return {kind for kind in kinds if kind not in explained} - set(names_matching(kinds, family.left_out))


def deciding_traits(config: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Return the traits of a model that Megatron Core cannot build, independently of its `model_type`."""
    kinds = _kinds(names)
    return [reason for reason, is_shown in _TRAITS if is_shown(config, kinds)]


def _has_true(*keys: str) -> Callable[[Mapping[str, Any], set[str]], bool]:
    return lambda config, kinds: any(config.get(key) not in (None, False, 0) for key in keys)


def _kinds_of_layer(kinds: Collection[str], mark: str) -> set[str]:
    return {kind for kind in kinds if _LAYER.search(kind) and re.search(mark, kind)}


def _has_parallel_blocks(config: Mapping[str, Any], kinds: set[str]) -> bool:
    """Return whether a key says so, or attention and MLP of a layer share one norm."""
    if _has_true("parallel_attn", "use_parallel_residual", "parallel_residual", "parallel_attention")(config, kinds):
        return True
    norms = {kind for kind in _kinds_of_layer(kinds, r"(norm|ln_?\w*)\.weight$") if not _OF_HEADS.search(kind)}
    attends = _kinds_of_layer(kinds, r"(attn|attention)\.")
    has_mlp = _kinds_of_layer(kinds, r"(mlp|feed_forward|ffn|fc_in)\.")
    return len(norms) == 1 and bool(attends) and bool(has_mlp)


def _has_alibi(config: Mapping[str, Any], kinds: set[str]) -> bool:
    inside = config.get("attn_config")
    nested = isinstance(inside, Mapping) and bool(inside.get("alibi"))
    return nested or bool(config.get("alibi")) or config.get("position_embedding_type") == "alibi"


def _norms_behind(config: Mapping[str, Any], kinds: set[str]) -> bool:
    """Return whether there is a norm after the MLP and none before it."""
    before = _kinds_of_layer(kinds, r"(pre_feedforward|pre_mlp|input)_layernorm|(ln_1|attention_norm)\.")
    return bool(_kinds_of_layer(kinds, "post_feedforward_layernorm")) and not before


_TRAITS: tuple[tuple[str, Callable[[Mapping[str, Any], set[str]], bool]], ...] = (
    (PARALLEL_BLOCKS, _has_parallel_blocks),
    (ALIBI, _has_alibi),
    (NORMS_BEHIND, _norms_behind),
    (FACTORS, _has_true("residual_multiplier", "scale_depth", "mlp_multipliers")),
    (CLIPPED, _has_true("clip_qkv")),
    (MAMBA_1, lambda config, kinds: bool(_kinds_of_layer(kinds, r"\.x_proj\.weight"))),
    (ENCODER, _has_true("is_encoder_decoder")),
    (CROSS_ATTENTION, _has_true("cross_attention_layers", "add_cross_attention")),
)
