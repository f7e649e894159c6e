"""Qwen2 and Qwen2.5; MiMo, which is one under another name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.arguments import ModelArguments
from mcore_ckpt_ext.families.common_settings import full_attention, llama_like
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Needs


class Qwen2(Family):
    """Like Llama, with biases of queries, keys and values; tied in the small models."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    without_effect: ClassVar[Sequence[str]] = ("sliding_window", "max_window_layers")
    rules = (*parts.DECODER, *parts.attention("bias"))
    settings = (
        *llama_like(groups=32),
        full_attention("use_mrope"),
        Needs({"add_bias_linear": False, "add_qkv_bias": True}),
    )


class MiMo(Qwen2):
    """The code of Qwen2, which its folders bring along under this name; transformers has no such class.

    Its layers that predict further tokens are left out: what they project comes in the other order than Megatron's.
    """

    model_type = "mimo"
    architecture = "MiMoForCausalLM"
    without_effect = (*Qwen2.without_effect, "num_nextn_predict_layers", "attention_bias")
    left_out: ClassVar[Sequence[str]] = (*Qwen2.left_out, r"^model\.mtp_layers\.")

    @override
    def rather_another(self, arguments: ModelArguments) -> list[str]:
        return ["all that Qwen2 is"]
