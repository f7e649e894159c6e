"""Llama 2, 3, 3.1, 3.2, 3.3, and every other model with its config."""

from __future__ import annotations

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.arguments import ModelArguments
from mcore_ckpt_ext.families.common_settings import DENSE, NO_WINDOW, llama_like
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Fixed, Needs


class Llama(Family):
    """RMS norms, rotary positions (scaled or not), grouped queries, SwiGLU, no biases; tied or untied."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    rules = parts.DECODER
    settings = (
        *llama_like(head_dim=True), DENSE, NO_WINDOW, Needs({"qk_layernorm": False}),
        Fixed("attention_bias", False, {"add_bias_linear": False, "add_qkv_bias": False}),
        Fixed("mlp_bias", False, {}),
    )  # fmt: skip

    @override
    def notices(self, arguments: ModelArguments) -> list[str]:
        if not arguments.use_rope_scaling or arguments.rope_scaling_factor == 8.0:
            return []
        return [
            f"positions are scaled by {arguments.rope_scaling_factor}, but Megatron's pretrain_gpt.py does not pass "
            "--rope-scaling-factor on and scales by 8 (gpt_builders.py, seen in 0.12 to 0.19)"
        ]
