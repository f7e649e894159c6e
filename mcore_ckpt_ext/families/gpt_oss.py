"""gpt-oss."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import head_size, query_groups, windows_in_some_layers
from mcore_ckpt_ext.families.common_settings import RMS_NORM, SIZES, TRAINING, experts_in_every_layer, tied_embeddings
from mcore_ckpt_ext.families.family import Family, Rule
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.rows import GATE_AND_UP_BY_TURNS, WHOLE, transpose
from mcore_ckpt_ext.families.settings import Coefficient, Constant, Custom, Mapped, Requires, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_OURS = "decoder.layers.{layer}"
_THEIRS = "model.layers.{layer}"
_EXPERT = f"{_OURS}.mlp.experts.experts.{{expert}}"
_EXPERTS = f"{_THEIRS}.mlp.experts"
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _why_not(arguments: ModelArguments) -> list[str]:
    """Return a reason if Megatron clamps before adding biases.

    It does so in `weighted_bias_quick_geglu_impl`, which it uses for experts that are not grouped.
    """
    fused = arguments.bias_gelu_fusion and not arguments.get("moe_grouped_gemm", True)
    return ["bias_gelu_fusion with experts one by one, which clamps before biases are added"] if fused else []


class GptOss(Family):
    """Experts in every layer, an attention sink per head, biases, and a window in every other layer.

    Experts are stacked and transpose.

    Gate and up projection are clamped, their rows alternate, and the gate is `x * sigmoid(1.702 * x)` (`quick_gelu` in
    Megatron). Sources: transformers/models/gpt_oss/modeling_gpt_oss.py (5.23); `SequentialMLP` and
    `DotProductAttention` of core_v0.16.1 to 0.19.2; gpt_oss/gpt_oss_bridge.py of Megatron-Bridge (commit 067f987d).
    """

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    rules = (
        parts.EMBEDDING,
        *parts.attention(),
        *parts.attention("bias"),
        parts.ATTENTION_OUTPUT,
        Rule(f"{_THEIRS}.self_attn.o_proj.bias", f"{_OURS}.self_attention.linear_proj.bias"),
        Rule(f"{_THEIRS}.self_attn.sinks", f"{_OURS}.self_attention.core_attention.softmax_offset"),
        Rule(f"{_THEIRS}.mlp.router.weight", f"{_OURS}.mlp.router.weight"),
        Rule(f"{_THEIRS}.mlp.router.bias", f"{_OURS}.mlp.router.bias"),
        Rule(f"{_EXPERTS}.gate_up_proj", f"{_EXPERT}.linear_fc1.weight", transpose(GATE_AND_UP_BY_TURNS)),
        Rule(f"{_EXPERTS}.gate_up_proj_bias", f"{_EXPERT}.linear_fc1.bias", GATE_AND_UP_BY_TURNS),
        Rule(f"{_EXPERTS}.down_proj", f"{_EXPERT}.linear_fc2.weight", transpose(WHOLE)),
        Rule(f"{_EXPERTS}.down_proj_bias", f"{_EXPERT}.linear_fc2.bias"),
        parts.ATTENTION_NORM,
        parts.MLP_NORM[1],
        *parts.OUTPUT,
    )
    # Keys that repeat others, or that only OpenAI's released code reads.
    without_effect = ("experts_per_token", "initial_context_length")
    settings = (
        *SIZES,
        query_groups(8),
        head_size(always=True, default=64),
        Rope(150000.0, scaling=_YARN),
        tied_embeddings(by_default=False),
        *TRAINING,
        RMS_NORM,
        Mapped("rms_norm_eps", "layernorm_epsilon", 1e-5),
        experts_in_every_layer(128),
        Size("num_experts_per_tok", "moe_router_topk", 4),
        Coefficient("router_aux_loss_coef", "moe_aux_loss_coeff", 0.001),
        windows_in_some_layers(128, every=2),
        Constant("hidden_act", "silu", {"swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0}),
        Constant("swiglu_alpha", 1.702, {}),
        Mapped("swiglu_limit", "activation_func_clamp_value", 7.0),
        Constant("attention_bias", True, {"add_bias_linear": True, "add_qkv_bias": True}),
        Custom((), lambda arguments: {}, lambda config: {"bias_gelu_fusion": False}, _why_not, ("bias_gelu_fusion",)),
        Requires({"softmax_type": "learnable", "moe_router_score_function": "softmax"}),
    )
