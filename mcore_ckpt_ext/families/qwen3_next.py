"""Qwen3-Next."""

from __future__ import annotations

from collections.abc import Collection

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import head_size, query_groups
from mcore_ckpt_ext.families.common_settings import NO_BIASES, SILU, SIZES, TRAINING, tied_embeddings
from mcore_ckpt_ext.families.config_checks import Config
from mcore_ckpt_ext.families.gated_delta_net import ATTENTION, BY_HEADS, NET, SETTINGS, WithGatedDeltaNets
from mcore_ckpt_ext.families.qwen_experts import SHARED_EXPERT_GATE, expert_settings
from mcore_ckpt_ext.families.rope import Rope
from mcore_ckpt_ext.families.settings import Constant, Custom, Mapped, Requires, Size
from mcore_ckpt_ext.job.model_arguments import ModelArguments

EXPERTS = (*parts.experts(), *parts.shared_experts("shared_expert"), SHARED_EXPERT_GATE)


class WithOneFurtherToken(WithGatedDeltaNets):
    """A family whose folders have at most one MTP layer."""

    megatron_left_out = (r"\.local_tokens_per_expert$",)

    @override
    def mtp_layers(self, names: Collection[str], arguments: ModelArguments) -> int:
        return int("mtp.fc.weight" in names)

    @override
    def unmapped_tensors(self, names: Collection[str], arguments: ModelArguments, config: Config) -> set[str]:
        left = set() if arguments.mtp_num_layers else {name for name in names if name.startswith("mtp.")}
        return super().unmapped_tensors(names, arguments, config) | left


class Qwen3Next(WithOneFurtherToken):
    """Gated delta nets in three of four layers, gated attention in the fourth; experts, one is shared."""

    model_type = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    rules = (
        parts.EMBEDDING,
        *ATTENTION,
        *NET,
        *BY_HEADS,
        *parts.MLP,
        *EXPERTS,
        *parts.MLP_NORM,
        *parts.OUTPUT,
        *parts.one_further_token((*ATTENTION, *parts.MLP, *EXPERTS, *parts.MLP_NORM)),
    )
    read_rules = parts.STACKED_EXPERTS
    without_effect = ("use_sliding_window", "max_window_layers")
    settings = (
        *SIZES,
        query_groups(2),
        head_size(always=True, default=256),
        Rope(partial=0.25),
        tied_embeddings(by_default=False),
        *TRAINING,
        SILU,
        Mapped("rms_norm_eps", "layernorm_epsilon", 1e-6),
        *SETTINGS,
        *expert_settings(512, 10, 512, normalized=True),
        Size("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 512),
        Constant("attention_bias", False, NO_BIASES),
        Requires({"moe_shared_expert_gate": True, "moe_router_score_function": "softmax"}),
        Custom((), lambda arguments: {}, lambda config: {"mtp_num_layers": 1}, parts.several_mtp_layers),
    )
