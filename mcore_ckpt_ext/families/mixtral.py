"""Mixtral."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import sliding_window
from mcore_ckpt_ext.families.common_settings import NO_BIASES, experts_in_every_layer, llama_like
from mcore_ckpt_ext.families.family import Family, Rule, with_experts
from mcore_ckpt_ext.families.settings import Coefficient, Mapped, Requires

_ROUTER = Rule("model.layers.{layer}.mlp.gate.weight", "decoder.layers.{layer}.mlp.router.weight", where=with_experts)


class Mixtral(Family):
    """Like Mistral, with experts in every layer; softmax is over the logits of the chosen experts."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    rules = (*parts.DECODER, *parts.experts("block_sparse_moe", gate="w1", up="w3", down="w2"))
    without_effect = ("router_jitter_noise",)
    read_rules = (_ROUTER, *parts.STACKED_EXPERTS)
    settings = (
        # The class has no default head size, which scaled positions need (modeling_rope_utils.py of transformers 5.23).
        *llama_like(1000000.0, 1e-5, groups=8, head_dim=True),
        experts_in_every_layer(8),
        Mapped("num_experts_per_tok", "moe_router_topk", 2),
        Coefficient("router_aux_loss_coef", "moe_aux_loss_coeff", 0.001),
        sliding_window(None),
        Requires(NO_BIASES),
    )
