"""DeepSeek-MoE of 16 billion parameters."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.common_settings import NO_BIASES, llama_like
from mcore_ckpt_ext.families.deepseek import dense_first, expert_sizes
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.settings import Coefficient, Constant


class DeepSeekMoE(Family):
    """DeepSeek-V2's experts without groups, with the attention of Llama.

    Its folders contain their own code (`modeling_deepseek.py`). Softmax comes before the choice of experts, and the
    weights of the chosen experts are not normalized (`MoEGate.forward`).
    """

    model_type = "deepseek"
    architecture = "DeepseekForCausalLM"
    rules = (*parts.DECODER, *parts.experts(), *parts.shared_experts("shared_experts"))
    settings = (
        *llama_like(),
        *expert_sizes(),
        dense_first(0),
        Coefficient("aux_loss_alpha", "moe_aux_loss_coeff", 0.001),
        Constant("norm_topk_prob", False, {"moe_router_pre_softmax": True}),
        Constant("scoring_func", "softmax", {"moe_router_score_function": "softmax"}),
        Constant("attention_bias", False, NO_BIASES),
    )
