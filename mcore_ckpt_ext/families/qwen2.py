"""Qwen2 and Qwen2.5; MiMo (same architecture)."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import ClassVar

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import full_attention, window_begins
from mcore_ckpt_ext.families.common_settings import llama_like
from mcore_ckpt_ext.families.config_checks import Config
from mcore_ckpt_ext.families.family import Family, Rule
from mcore_ckpt_ext.families.settings import Custom, Requires
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_SAID = "num_nextn_predict_layers"


class Qwen2(Family):
    """Like Llama, with biases of queries, keys and values; tied embeddings in small models."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    without_effect: ClassVar[Sequence[str]] = ("sliding_window", "max_window_layers")
    rules = (*parts.DECODER, *parts.attention("bias"))
    settings = (
        *llama_like(groups=32),
        full_attention("use_mrope", reaches=window_begins),
        Requires({"add_bias_linear": False, "add_qkv_bias": True}),
    )


_MTP_LAYER = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "final_layernorm",
}
_OF_MTP = re.compile(r"model\.mtp_layers\.(\d+)\.")


def _mtp_layers() -> tuple[Rule, ...]:
    """Return the rules of MTP layers, whose projection has hidden state and embedding in opposite order.

    Source: models/mimo/mimo_bridge.py of Megatron-Bridge (commit 067f987d).
    """
    ours = "mtp.layers.{step}"
    theirs = "model.mtp_layers.{step}"
    return (
        *(
            Rule(f"{theirs}.{their_name}.weight", f"{ours}.{other}.weight", swapped=their_name == "input_proj")
            for their_name, other in _MTP_LAYER.items()
        ),
        *parts.inner_layer(Qwen2.rules, theirs),
    )


class MiMo(Qwen2):
    """Qwen2's code, which MiMo's folders contain under this name; transformers has no such class."""

    model_type = "mimo"
    contained_in = "Qwen2"
    architecture = "MiMoForCausalLM"
    alternative_architecture = "Qwen2ForCausalLM"
    without_effect = (*Qwen2.without_effect, "attention_bias")
    megatron_left_out: ClassVar[Sequence[str]] = (r"\.local_tokens_per_expert$",)
    rules = (*Qwen2.rules, *_mtp_layers())
    settings = (
        *Qwen2.settings,
        Custom(
            (_SAID,),
            lambda arguments: {_SAID: arguments.mtp_num_layers or 0},
            lambda config: {"mtp_num_layers": config.get(_SAID) or None},
        ),
    )

    @override
    def mtp_layers(self, names: Collection[str], arguments: ModelArguments) -> int:
        return len({match[1] for name in names if (match := _OF_MTP.match(name))})

    @override
    def unmapped_tensors(self, names: Collection[str], arguments: ModelArguments, config: Config) -> set[str]:
        left = set() if arguments.mtp_num_layers else {name for name in names if _OF_MTP.match(name)}
        return super().unmapped_tensors(names, arguments, config) | left
