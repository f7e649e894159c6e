"""Llama-Nemotron Super and Ultra (layers that differ in size, found by architecture search)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import head_size
from mcore_ckpt_ext.families.common_settings import NO_BIASES, RMS_NORM, SILU, TRAINING, tied_embeddings
from mcore_ckpt_ext.families.config_checks import Config, checked_divisor, checked_size, unrepresentable
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.parameter_shapes import parameter_shape
from mcore_ckpt_ext.families.rope import Rope, base_of, rope_parameters
from mcore_ckpt_ext.families.settings import Constant, Custom, Mapped, Requires, Setting, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments
from mcore_ckpt_ext.model_space.names import split_layer

_ENCODED = "heterogeneous_layers_config_encoded_json"
_PATH = "heterogeneous_layers_config_path"
_BLOCKS = "block_configs"
_ATTENTION = "attention"
_MLP = "ffn"
_HEADS_IN_GROUP = "n_heads_in_group"
_WIDTH = "ffn_mult"
_NO_OP = "no_op"
_MULTIPLE = 256
# The keys of a block's parts that can be converted; other keys must have no value.
_KEYS = {_ATTENTION: {_NO_OP, _HEADS_IN_GROUP}, _MLP: {_NO_OP, _WIDTH, "gated", "hidden_act"}}
_NEUTRAL = {"gated": True, "hidden_act": "silu"}


@dataclass(frozen=True)
class Block:
    """A layer of a heterogeneous model.

    Attributes:
        groups: number of query groups; None without attention.
        width: of the MLP; None without one.
    """

    groups: int | None
    width: int | None


def width_of_mlp(factor: float, hidden_size: int) -> int:
    """Return the width of an MLP, rounded up to a multiple of 256.

    Source: `MLPConfig.ffn_mult_to_intermediate_size` (megatron/core/transformer/heterogeneous/heterogeneous_config.py,
    core_v0.12 to 0.19.2), as in the code of the released folders.
    """
    return -(-int(2 * factor * hidden_size / 3) // _MULTIPLE) * _MULTIPLE


def blocks_of(arguments: ModelArguments) -> tuple[Block, ...]:
    """Return the layers of a model; empty if all of them are alike."""
    encoded = arguments.get(_ENCODED)
    return _blocks(encoded, arguments.num_attention_heads, arguments.hidden_size) if encoded else ()


@lru_cache(maxsize=8)
def _blocks(encoded: str, heads: int, hidden: int) -> tuple[Block, ...]:
    return tuple(_read_blocks(json.loads(encoded)[_BLOCKS], heads, hidden))


def _read_blocks(blocks: Sequence[Mapping[str, Any]], heads: int, hidden: int) -> Iterator[Block]:
    for number, block in enumerate(blocks):
        for part, known_keys in _KEYS.items():
            for key, value in block[part].items():
                if key not in known_keys and value not in (None, False):
                    raise unrepresentable(f"{_BLOCKS}[{number}].{part}.{key}", value, "null or false")
                if value not in (None, _NEUTRAL.get(key, value)):
                    raise unrepresentable(f"{_BLOCKS}[{number}].{part}.{key}", value, str(_NEUTRAL[key]))
        attention = block[_ATTENTION]
        mlp = block[_MLP]
        key = f"{_BLOCKS}[{number}].{_HEADS_IN_GROUP}"
        yield Block(
            None if attention.get(_NO_OP) else heads // checked_divisor(key, attention[_HEADS_IN_GROUP], heads),
            None if mlp.get(_NO_OP) else checked_size(_WIDTH, width_of_mlp(mlp[_WIDTH], hidden)),
        )


def _layers() -> Setting:
    """Return the setting of layers.

    Megatron reads them from a folder's own `config.json`; its parser requires equal query groups.

    Sources: `HeterogeneousTransformerConfig`, and `validate_model_config_args_from_heterogeneous_config`
    (megatron/training/arguments.py, core_v0.19.0 and the development head of August 2026).
    """

    def to_config(arguments: ModelArguments) -> dict[str, Any]:
        return {_BLOCKS: json.loads(arguments.get(_ENCODED))[_BLOCKS]}

    def to_arguments(config: Config) -> dict[str, Any]:
        heads = config["num_attention_heads"]
        hidden = config["hidden_size"]
        blocks = [*_read_blocks(config[_BLOCKS], heads, hidden)]
        if len(blocks) != config["num_hidden_layers"]:
            raise unrepresentable(_BLOCKS, quantity(len(blocks), "block"), f"{config['num_hidden_layers']}, as layers")
        groups = {block.groups for block in blocks if block.groups}
        if len(groups) != 1:
            raise unrepresentable(
                _HEADS_IN_GROUP, sorted(heads // group_count for group_count in groups), "one number for all layers"
            )
        positions = rope_parameters(config)
        if positions["rope_type"] != "llama3":
            raise unrepresentable("rope_scaling", positions["rope_type"], "llama3, which Megatron requires here")
        encoded = {
            _BLOCKS: config[_BLOCKS],
            "hidden_act": "silu",
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_hidden_layers": len(blocks),
            "rope_scaling": {"factor": float(positions["factor"])},
            "rope_theta": base_of(positions),
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        }
        return {
            _ENCODED: json.dumps(encoded, sort_keys=True),
            _PATH: "config.json",
            "use_rotary_position_embeddings": True,
            "group_query_attention": True,
            "num_query_groups": groups.pop(),
            "ffn_hidden_size": max(block.width or 0 for block in blocks) or 4 * hidden,
        }

    def why_not(arguments: ModelArguments) -> list[str]:
        try:
            blocks = blocks_of(arguments)
        except (KeyError, TypeError, ValueError, ArithmeticError, UnsupportedCheckpointError) as error:
            return [f"{_ENCODED} describes no such layers: {error}"]
        return [] if len(blocks) == arguments.num_layers else [f"{_ENCODED} describes {quantity(len(blocks), 'layer')}"]

    return Custom(
        (_BLOCKS, "num_key_value_heads", "intermediate_size"), to_config, to_arguments, why_not, (_ENCODED, _PATH)
    )


def attends(arguments: ModelArguments, layer: int) -> bool:
    """Return True if a layer has attention."""
    blocks = blocks_of(arguments)
    return not blocks or blocks[layer].groups is not None


def has_mlp(arguments: ModelArguments, layer: int) -> bool:
    """Return True if a layer has an MLP."""
    blocks = blocks_of(arguments)
    return not blocks or blocks[layer].width is not None


class LlamaNemotron(Family):
    """Llama whose MLPs differ in width, and whose layers may lack attention or an MLP.

    Its folders contain their own code (`modeling_decilm.py`); names and rows are those of Megatron-Bridge 0.6.2
    (llama_nemotron/llama_nemotron_bridge.py).
    """

    model_type = "nemotron-nas"
    architecture = "DeciLMForCausalLM"
    bridge_provider = "llama_nemotron.llama_nemotron_provider.LlamaNemotronHeterogeneousProvider"
    rules = (
        parts.EMBEDDING,
        *(replace(rule, where=attends) for rule in (*parts.attention(), parts.ATTENTION_OUTPUT, parts.ATTENTION_NORM)),
        *(replace(rule, where=has_mlp) for rule in (*parts.MLP, parts.MLP_NORM[0])),
        *parts.OUTPUT,
    )
    settings = (
        Size("num_hidden_layers", "num_layers", counted=True),
        Size("hidden_size", "hidden_size"),
        Size("num_attention_heads", "num_attention_heads", counted=True),
        Size("max_position_embeddings", "max_position_embeddings"),
        Size("vocab_size", "vocab_size"),
        head_size(),
        _layers(),
        Rope(),
        tied_embeddings(by_default=False),
        *TRAINING,
        SILU,
        RMS_NORM,
        Mapped("rms_norm_eps", "layernorm_epsilon", 1e-6),
        Constant("mlp_bias", False, {}),
        Constant("attention_bias", False, NO_BIASES),
        Requires({"use_rope_scaling": True}),
    )

    @override
    def shape(self, name: str, arguments: ModelArguments) -> tuple[int, ...]:
        layer, _ = split_layer(name)
        width = blocks_of(arguments)[layer.number].width if layer else None
        return parameter_shape(name, arguments.replace(ffn_hidden_size=width) if width else arguments)

    @override
    def notices(self, arguments: ModelArguments) -> list[str]:
        return [f"--{_PATH.replace('_', '-')} takes the config.json of the Hugging Face folder, by its path"]

    @override
    def bridge_fields(self, arguments: ModelArguments) -> dict[str, Any]:
        return {_ENCODED: arguments.get(_ENCODED)}
