"""Qwen3.5 and 3.6, dense and with experts (language model)."""

from __future__ import annotations

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import head_size, query_groups
from mcore_ckpt_ext.families.common_settings import NO_BIASES, SILU, SIZES, TRAINING, tied_embeddings
from mcore_ckpt_ext.families.gated_delta_net import ATTENTION, BY_PARTS, NET, SETTINGS
from mcore_ckpt_ext.families.qwen3_next import EXPERTS, WithOneFurtherToken
from mcore_ckpt_ext.families.qwen_experts import expert_count
from mcore_ckpt_ext.families.rope import OF_IMAGES, Rope
from mcore_ckpt_ext.families.settings import Coefficient, Constant, Custom, Forbidden, Mapped, Requires, Setting, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments


def _further() -> Setting:
    key = "mtp_num_hidden_layers"
    return Custom(
        (key,),
        lambda arguments: {key: arguments.mtp_num_layers or 0},
        lambda config: {"mtp_num_layers": 1},  # the layers in the folder count
        parts.several_mtp_layers,
    )


def _common(groups: int) -> tuple[Setting, ...]:
    return (
        query_groups(groups),
        head_size(always=True, default=256),
        Rope(partial=0.25, ignored=OF_IMAGES),
        tied_embeddings(by_default=False),
        *TRAINING,
        SILU,
        Mapped("rms_norm_eps", "layernorm_epsilon", 1e-6),
        *SETTINGS,
        Constant("attention_bias", False, NO_BIASES),
        Constant("attn_output_gate", True, {}),
        Forbidden("mlp_only_layers", "mtp_use_dedicated_embeddings"),
        _further(),
    )


class Qwen35(WithOneFurtherToken):
    """Gated delta nets in three of every four layers, and gated attention in the fourth."""

    model_type = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    rules = (
        parts.EMBEDDING,
        *ATTENTION,
        *NET,
        *BY_PARTS,
        *parts.MLP,
        *parts.MLP_NORM,
        *parts.OUTPUT,
        *parts.one_further_token((*ATTENTION, *parts.MLP, *parts.MLP_NORM)),
    )
    without_effect = ("mamba_ssm_dtype",)
    settings = (*SIZES, *_common(4))


def _why_not(arguments: ModelArguments) -> list[str]:
    return [] if arguments.num_experts and arguments.moe_layer_freq == 1 else ["no experts in all layers"]


class Qwen35MoE(WithOneFurtherToken):
    """Qwen3.5 with experts, one of them shared."""

    model_type = "qwen3_5_moe_text"
    architecture = "Qwen3_5MoeForCausalLM"
    rules = (
        parts.EMBEDDING,
        *ATTENTION,
        *NET,
        *BY_PARTS,
        *EXPERTS,
        *parts.MLP_NORM,
        *parts.OUTPUT,
        *parts.one_further_token((*ATTENTION, *EXPERTS, *parts.MLP_NORM)),
    )
    read_rules = (*parts.STACKED_EXPERTS, *parts.inner_layer(parts.STACKED_EXPERTS, "mtp.layers.{step}"))
    without_effect = ("mamba_ssm_dtype", "intermediate_size")
    settings = (
        *(size for size in SIZES if size.keys != ("intermediate_size",)),
        *_common(2),
        expert_count(256),
        Custom(
            (),
            lambda arguments: {},
            lambda config: {"moe_layer_freq": 1, "ffn_hidden_size": config.get("moe_intermediate_size", 512)},
            _why_not,
            expressed=("moe_layer_freq",),
        ),
        Size("num_experts_per_tok", "moe_router_topk", 8),
        Size("moe_intermediate_size", "moe_ffn_hidden_size", 512),
        Size("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 512),
        Coefficient("router_aux_loss_coef", "moe_aux_loss_coeff", 0.001),
        Constant("norm_topk_prob", True, {"moe_router_pre_softmax": False}),
        Requires({"moe_shared_expert_gate": True, "moe_router_score_function": "softmax"}),
    )
