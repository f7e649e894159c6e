"""The model that follows from the arguments of a job, and the sizes of parameters that follow from the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mcore_ckpt_ext.arguments import JobArguments
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.model_space.names import LayerSpec, module_and_leaf, of_experts, under_spec


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Everything that defines a model: every argument has a value.

    A default here is what an argument means where a job does not have it because its version did not have it yet
    (megatron/training/arguments.py and TransformerConfig, megatron/core/transformer/transformer_config.py, core_v0.7.0
    to 0.19.2). None is Megatron's own None.

    Attributes:
        job: what the job states, from which this was made.
    """

    job: JobArguments = field(repr=False)

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    transformer_impl: str = "transformer_engine"
    untie_embeddings_and_output_weights: bool = False
    scaled_embeddings: bool = False
    final_logit_softcap: float | None = None
    init_method_std: float = 0.02

    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    apply_residual_connection_post_layernorm: bool = False
    add_bias_linear: bool = True
    hidden_dropout: float = 0.1

    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000
    rotary_base_local: float | None = None
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rotary_seq_len_interpolation_factor: float | None = None
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    no_rope_freq: int | Sequence[int] | None = None
    rope_type: str | None = None
    rotary_scaling_factor: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    beta_fast: float = 32
    beta_slow: float = 1
    original_max_position_embeddings: int = 4096
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_correction_range_round_to_int: bool = True

    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    qk_l2_norm: bool = False
    experimental_attention_variant: str | None = None
    linear_attention_freq: int | Sequence[int] | None = None
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    dsa_indexer_n_heads: int | None = None
    dsa_indexer_head_dim: int | None = None
    dsa_indexer_topk: int | None = None
    dsa_indexer_topk_freq: int = 1
    dsa_indexer_skip_topk_offset: int = 0
    dsa_indexer_rope_interleaved: bool = False
    dsa_indexer_rotate_activation: bool = True
    dsa_indexer_scoring_relu: bool = True
    dsa_indexer_k_norm_epsilon: float | None = None
    dsa_indexer_k_norm_fp32: bool = False
    attention_output_gate: bool = False
    attention_dropout: float = 0.1
    attention_softcap: float | None = None
    softmax_type: str = "vanilla"
    softmax_scale: float | None = None
    window_size: Sequence[int] | None = None
    window_attn_skip_freq: int | Sequence[int] | None = None
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    swiglu: bool = False
    squared_relu: bool = False
    quick_geglu: bool = False
    openai_gelu: bool = False
    gated_linear_unit: bool = False
    glu_linear_offset: float = 0.0
    activation_func_clamp_value: float | None = None
    bias_gelu_fusion: bool = True

    num_experts: int | None = None
    moe_layer_freq: int | Sequence[int] = 1
    moe_ffn_hidden_size: int
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_router_score_function: str = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_aux_loss_coeff: float | Sequence[float] = 0.0
    mtp_num_layers: int | None = None

    def value(self, name: str) -> Any:
        """An argument that a table names; if the model does not depend on it, what the job states, or None.

        Raises:
            UnsupportedCheckpointError: nothing here looks at it, and the job does not state it either.
        """
        return getattr(self, name) if name in _NAMES else self.job.value(name)

    def stated_value(self, name: str, unknown: Any = None) -> Any:
        """Like `value`, for an argument that many jobs do not have: then `unknown`."""
        return getattr(self, name) if name in _NAMES else self.job.stated.get(name, unknown)

    def known(self, name: str) -> Any:
        """Like `value`, for an argument that must be known.

        Raises:
            UnsupportedCheckpointError: it is not.
        """
        value = self.value(name)
        if value is None:
            raise _unsaid(name, self.job)
        return value

    def stated(self) -> dict[str, Any]:
        """The arguments by name: what the job states, and what that means for the model."""
        return {**self.job.stated, **{name: getattr(self, name) for name in _NAMES}}


_NAMES = tuple(one.name for one in fields(ModelArguments) if one.name != "job")


_ROTARY = ("rope", "yarn", "mrope")


def complete(job: JobArguments) -> ModelArguments:
    """The model that follows from the arguments of a job.

    Raises:
        UnsupportedCheckpointError: the job does not say how large it is, or, as a description of another loop, what the
            base of its rotary positions is.
    """
    known = {name: value for name in _NAMES if (value := getattr(job, name)) is not None}
    for old, new in (("norm_epsilon", "layernorm_epsilon"), ("apply_layernorm_1p", "layernorm_zero_centered_gamma")):
        if (value := getattr(job, old)) is not None:
            known.setdefault(new, value)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not known.get(name):
            raise _unsaid(name, job)
    hidden, heads = known["hidden_size"], known["num_attention_heads"]
    if not job.group_query_attention:
        known["num_query_groups"] = heads
    known["kv_channels"] = known.get("kv_channels") or hidden // heads
    known["ffn_hidden_size"] = known.get("ffn_hidden_size") or 4 * hidden
    known["moe_ffn_hidden_size"] = known.get("moe_ffn_hidden_size") or known["ffn_hidden_size"]
    if job.use_rotary_position_embeddings:
        known["position_embedding_type"] = "rope"
    if not job.tells_all and known.get("position_embedding_type") in _ROTARY and "rotary_base" not in known:
        raise UnsupportedCheckpointError(
            "the checkpoint does not say the base of its rotary positions", expected="rotary_base", where=job.source,
            helps="say it: --argument rotary_base=500000, for example, and, where positions are scaled, "
            "use_rope_scaling and rope_scaling_factor",
        )  # fmt: skip
    return ModelArguments(job=job, **known)


def _unsaid(name: str, job: JobArguments) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        "the checkpoint does not say how large its model is", expected=name, where=job.source,
        helps="only checkpoints that hold Megatron's arguments can be converted to Hugging Face",
    )  # fmt: skip


def has_experts(arguments: ModelArguments, layer: int) -> bool:
    """Whether a decoder layer has experts (`get_gpt_decoder_layer_specs`, models/gpt/gpt_layer_specs.py)."""
    if not arguments.num_experts:
        return False
    frequency = arguments.moe_layer_freq
    return layer % frequency == 0 if isinstance(frequency, int) else bool(frequency[layer])


def is_gated(arguments: ModelArguments) -> bool:
    """Whether `linear_fc1` holds a gate, too."""
    return any(arguments.value(name) for name in ("swiglu", "quick_geglu", "gated_linear_unit"))


def parameter_shape(name: str, arguments: ModelArguments) -> tuple[int, ...]:
    """The shape of a parameter of `GPTModel`, the vocabulary not padded.

    Sources, core_v0.12 to 0.19.2: attention.py, multi_latent_attention.py, mlp.py, moe/ of megatron/core/transformer.

    Args:
        name: model-space name.
        arguments: from `complete`, with `vocab_size`.

    Raises:
        UnsupportedCheckpointError: no rule says so.
    """
    module, leaf = module_and_leaf(name)
    if leaf in ("expert_bias", "gate_weight"):
        return (arguments.num_experts or 0,) if leaf == "expert_bias" else (1, arguments.hidden_size)
    if leaf == "softmax_offset":
        return (arguments.num_attention_heads,)
    found = _linear(name, module, arguments) or _norm(module, leaf, arguments)
    if found is None:
        raise UnsupportedCheckpointError("the shape of a parameter is not known", where=name)
    if leaf.startswith("layer_norm_"):
        return found[-1:]
    return found[:1] if leaf == "bias" else found


def _linear(name: str, module: str, arguments: ModelArguments) -> tuple[int, int] | None:
    """(output features, input features)."""

    def size(argument: str) -> int:
        return int(arguments.value(argument) or 0)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    gates, gated = 2 if is_gated(arguments) else 1, 2 if arguments.attention_output_gate else 1
    ffn = size(
        "moe_ffn_hidden_size" if of_experts(name)
        else "moe_shared_expert_intermediate_size" if ".shared_experts." in name
        else "ffn_hidden_size"
    )  # fmt: skip
    latent = size("qk_head_dim") + size("qk_pos_emb_head_dim")
    values = size("v_head_dim") if arguments.multi_latent_attention else size("kv_channels")
    shapes = {
        "word_embeddings": (size("vocab_size"), hidden),
        "position_embeddings": (size("max_position_embeddings"), hidden),
        "output_layer": (size("vocab_size"), hidden),
        "linear_qkv": ((gated * heads + 2 * size("num_query_groups")) * size("kv_channels"), hidden),
        "linear_proj": (hidden, heads * values),
        "linear_q_proj": (heads * latent, hidden),
        "linear_q_down_proj": (size("q_lora_rank"), hidden),
        "linear_q_up_proj": (heads * latent, size("q_lora_rank")),
        "linear_kv_down_proj": (size("kv_lora_rank") + size("qk_pos_emb_head_dim"), hidden),
        "linear_kv_up_proj": (heads * (size("qk_head_dim") + size("v_head_dim")), size("kv_lora_rank")),
        "linear_fc1": (gates * ffn, hidden),
        "linear_fc2": (hidden, ffn),
        "router": (size("num_experts"), hidden),
        "eh_proj": (hidden, 2 * hidden),
    }
    return shapes.get(module)


def _norm(module: str, leaf: str, arguments: ModelArguments) -> tuple[int, ...] | None:
    latent = arguments.multi_latent_attention
    widths = {
        "input_layernorm": "hidden_size", "pre_mlp_layernorm": "hidden_size", "final_layernorm": "hidden_size",
        "q_layernorm": "q_lora_rank" if latent else "kv_channels", "k_layernorm": "kv_channels",
        "kv_layernorm": "kv_lora_rank", "post_layernorm": "hidden_size",
        "enorm": "hidden_size", "hnorm": "hidden_size",
    }  # fmt: skip
    known = module in widths and leaf in ("weight", "bias")
    return (int(arguments.value(widths[module]) or 0),) if known else None


def spec_name(name: str, arguments: ModelArguments) -> str:
    """A model-space name of Transformer Engine's layer spec, under the spec that the arguments choose."""
    if arguments.transformer_impl != "local":
        return name
    return under_spec(name, LayerSpec.LOCAL_LATENT if arguments.multi_latent_attention else LayerSpec.LOCAL)
