"""EXAONE 4.0 with full attention (1.2B)."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import check_kinds_of_attention
from mcore_ckpt_ext.families.common_settings import NO_BIASES, llama_like
from mcore_ckpt_ext.families.config_checks import Config, unrepresentable
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.gemma2 import NORMS_AFTER_BLOCKS
from mcore_ckpt_ext.families.settings import Custom, Requires
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_WINDOW = "sliding_window"
_PATTERN = "sliding_window_pattern"
_KINDS = "layer_types"
_FULL = "full_attention"


def _full_attention_settings(config: Config) -> dict[str, Any]:
    """Check that no layer has a window.

    If `sliding_window` is set, layers without a window have no positions (`Exaone4Attention` of transformers 5.23).
    """
    if (width := config.get(_WINDOW, 4096)) is not None:
        has_layers = f"{width}, with layers that have neither window nor positions"
        raise unrepresentable(_WINDOW, has_layers, "null: Megatron-Bridge only builds EXAONE 4.0 with full attention")
    check_kinds_of_attention(config, _FULL)
    return {}


class Exaone4(Family):
    """Llama with norms of queries and keys, and norms after attention and MLP instead of before them.

    The names are those of Megatron-Bridge, in which a norm after a block is part of the preceding linear layer
    (exaone/exaone4 of 0.6.0 and commit 067f987d). Its layer spec names no norms of queries and keys; Megatron Core
    since 0.19 builds them under `qk_layernorm` all the same (transformer/attention.py).
    """

    model_type = "exaone4"
    architecture = "Exaone4ForCausalLM"
    bridge_only_reason = "Megatron Core norms what goes into a block, and this model what comes out of it"
    rules = (
        parts.EMBEDDING,
        *parts.attention(),
        parts.ATTENTION_OUTPUT,
        *parts.QUERY_KEY_NORMS,
        *parts.MLP,
        *NORMS_AFTER_BLOCKS,
        *parts.OUTPUT,
    )
    without_effect = (_PATTERN,)
    settings = (
        *llama_like(epsilon=1e-5, groups=32),
        Custom(
            (_WINDOW, _KINDS),
            lambda arguments: {_WINDOW: None, _KINDS: [_FULL] * arguments.num_layers},
            _full_attention_settings,
        ),
        Requires({**NO_BIASES, "qk_layernorm": True}),
    )

    @override
    def bridge_fields(self, arguments: ModelArguments) -> dict[str, Any]:
        spec = "megatron.bridge.models.exaone.exaone4.exaone4_provider.exaone4_layer_spec"
        return {"transformer_layer_spec": {"_target_": spec, "_call_": False}}
