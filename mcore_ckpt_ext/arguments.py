"""The arguments of a job, as far as this package looks at them: typed, checked once, and honest about what is unknown.

Whatever a checkpoint has becomes one `JobArguments`: Megatron's parsed `args`, and what other training loops describe
their jobs by. Nothing else looks arguments up by name, but for tables of names that are data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from mcore_ckpt_ext import argument_kinds as kinds
from mcore_ckpt_ext.argument_kinds import MOST_LAYERS, is_whole
from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.versions import Version

# Many times what there has been. Arguments that say more are damaged, and what they count is walked one by one.
MOST_EXPERTS = 1 << 16
MOST_RANKS = 1 << 22
_MOST_EXPERTS_IN_ALL = 1 << 20
_MOST_ELEMENTS = 1 << 40


@dataclass(frozen=True, kw_only=True)
class JobArguments:
    """What is known of the arguments of a job, under Megatron's own names of them.

    A field is None where its argument is not known, and where it is None for Megatron, too; `is_known` tells these
    apart. No field has Megatron's default in place of what nobody stated: versions differ in their defaults, and
    whoever needs one says which (`families.arguments.ModelArguments`). Sources of the names and of their values:
    megatron/training/arguments.py and megatron/core/transformer/transformer_config.py, core_v0.7.0 to 0.19.2.

    Attributes:
        stated: everything that the source says, by name, as it says it.
        source: what states it, for messages.
        version: the release of Megatron Core that wrote the source, where that is recorded.
        tells_all: the source has every argument of its job, as Megatron's own `args` do: one that it does not state
            did not exist in its version. Other descriptions leave out what they please.

    Raises:
        UnreadableCheckpointError: an argument has a value that no job can have.
    """

    stated: Mapping[str, Any] = field(default_factory=dict, repr=False)
    source: str = "the arguments of the job"
    version: Version | None = None
    tells_all: bool = True

    # The parallel layout.
    tensor_model_parallel_size: int | None = kinds.whole(MOST_RANKS)
    pipeline_model_parallel_size: int | None = kinds.whole(MOST_RANKS)
    virtual_pipeline_model_parallel_size: int | None = kinds.whole(MOST_LAYERS)
    expert_model_parallel_size: int | None = kinds.whole(MOST_RANKS)
    expert_tensor_parallel_size: int | None = kinds.whole(MOST_RANKS)
    context_parallel_size: int | None = kinds.whole(MOST_RANKS)
    data_parallel_size: int | None = kinds.whole(MOST_RANKS)
    world_size: int | None = kinds.whole(MOST_RANKS)
    use_tp_pp_dp_mapping: bool | None = kinds.flag()

    # Which layers a pipeline stage has.
    num_layers: int | None = kinds.whole(MOST_LAYERS)
    decoder_first_pipeline_num_layers: int | None = kinds.whole(MOST_LAYERS)
    decoder_last_pipeline_num_layers: int | None = kinds.whole(MOST_LAYERS)
    pipeline_model_parallel_layout: object = kinds.anything()
    account_for_embedding_in_pipeline_split: bool | None = kinds.flag()
    account_for_loss_in_pipeline_split: bool | None = kinds.flag()
    hybrid_layer_pattern: str | None = kinds.text()

    # The gradient buffers and the optimizer.
    use_distributed_optimizer: bool | None = kinds.flag()
    use_precision_aware_optimizer: bool | None = kinds.flag()
    main_params_dtype: object = kinds.anything()
    optimizer_cpu_offload: bool | None = kinds.flag()
    num_distributed_optimizer_instances: int | None = kinds.whole(MOST_RANKS)
    overlap_grad_reduce: bool | None = kinds.flag()
    overlap_param_gather_with_optimizer_step: bool | None = kinds.flag()
    ddp_bucket_size: int | None = kinds.whole(_MOST_ELEMENTS)
    ddp_num_buckets: int | None = kinds.whole(_MOST_ELEMENTS)
    ddp_pad_buckets_for_high_nccl_busbw: bool | None = kinds.flag()
    accumulate_allreduce_grads_in_fp32: bool | None = kinds.flag()
    fp8_param_gather: bool | None = kinds.flag()
    fp4_param_gather: bool | None = kinds.flag()
    first_last_layers_bf16: bool | None = kinds.flag()
    num_layers_at_start_in_bf16: int | None = kinds.whole(MOST_LAYERS)
    num_layers_at_end_in_bf16: int | None = kinds.whole(MOST_LAYERS)

    lr: float | None = kinds.number()
    min_lr: float | None = kinds.number()
    decoupled_lr: float | None = kinds.number()
    decoupled_min_lr: float | None = kinds.number()

    # Saving, and what the run says of itself.
    no_save_optim: bool | None = kinds.flag()
    ckpt_fully_parallel_save: bool | None = kinds.flag()
    dist_ckpt_strictness: str | None = kinds.text()
    seq_length: int | None = kinds.whole(_MOST_ELEMENTS)
    global_batch_size: int | None = kinds.whole(_MOST_ELEMENTS)
    rampup_batch_size: object = kinds.anything()
    consumed_train_samples: int | None = kinds.whole(1 << 62)
    consumed_valid_samples: int | None = kinds.whole(1 << 62)
    tokenizer_type: str | None = kinds.text()
    bf16: bool | None = kinds.flag()
    fp16: bool | None = kinds.flag()
    params_dtype: object = kinds.anything()

    # Sizes of the model.
    hidden_size: int | None = kinds.whole(_MOST_ELEMENTS)
    ffn_hidden_size: int | None = kinds.whole(_MOST_ELEMENTS)
    num_attention_heads: int | None = kinds.whole(MOST_EXPERTS)
    group_query_attention: bool | None = kinds.flag()
    num_query_groups: int | None = kinds.whole(MOST_EXPERTS)
    kv_channels: int | None = kinds.whole(_MOST_ELEMENTS)
    max_position_embeddings: int | None = kinds.whole(_MOST_ELEMENTS)
    vocab_size: int | None = kinds.whole(_MOST_ELEMENTS)
    padded_vocab_size: int | None = kinds.whole(_MOST_ELEMENTS)
    make_vocab_size_divisible_by: int | None = kinds.whole(_MOST_ELEMENTS)
    mtp_num_layers: int | None = kinds.whole(MOST_LAYERS)
    mamba_state_dim: int | None = kinds.whole(_MOST_ELEMENTS)
    mamba_head_dim: int | None = kinds.whole(_MOST_ELEMENTS)
    mamba_num_groups: int | None = kinds.whole(_MOST_ELEMENTS)
    mamba_num_heads: int | None = kinds.whole(_MOST_ELEMENTS)

    # What it is built of.
    transformer_impl: str | None = kinds.text()
    is_hybrid_model: bool | None = kinds.flag()
    spec: object = kinds.anything()
    hetereogenous_dist_checkpoint: bool | None = kinds.flag()
    heterogeneous_layers_config_path: str | None = kinds.text()
    heterogeneous_layers_config_encoded_json: str | None = kinds.text()
    untie_embeddings_and_output_weights: bool | None = kinds.flag()
    normalization: str | None = kinds.text()
    layernorm_epsilon: float | None = kinds.not_negative()
    norm_epsilon: float | None = kinds.not_negative()
    layernorm_zero_centered_gamma: bool | None = kinds.flag()
    apply_layernorm_1p: bool | None = kinds.flag()
    apply_residual_connection_post_layernorm: bool | None = kinds.flag()
    add_bias_linear: bool | None = kinds.flag()
    init_method_std: float | None = kinds.not_negative()
    hidden_dropout: float | None = kinds.number()
    scaled_embeddings: bool | None = kinds.flag()
    final_logit_softcap: float | None = kinds.number()

    # Positions.
    position_embedding_type: str | None = kinds.text()
    use_rotary_position_embeddings: bool | None = kinds.flag()
    rotary_base: float | None = kinds.above_zero()
    rotary_base_local: float | None = kinds.above_zero()
    rotary_percent: float | None = kinds.not_negative()
    rotary_interleaved: bool | None = kinds.flag()
    rotary_seq_len_interpolation_factor: float | None = kinds.above_zero()
    use_rope_scaling: bool | None = kinds.flag()
    rope_scaling_factor: float | None = kinds.above_zero()
    no_rope_freq: int | Sequence[int] | None = kinds.frequency()
    rope_type: str | None = kinds.text()
    rotary_scaling_factor: float | None = kinds.above_zero()
    mscale: float | None = kinds.number()
    mscale_all_dim: float | None = kinds.number()
    beta_fast: float | None = kinds.above_zero()
    beta_slow: float | None = kinds.above_zero()
    original_max_position_embeddings: int | None = kinds.whole(_MOST_ELEMENTS)
    yarn_original_max_position_embeddings: int | None = kinds.whole(_MOST_ELEMENTS)
    yarn_beta_fast: float | None = kinds.above_zero()
    yarn_beta_slow: float | None = kinds.above_zero()
    yarn_correction_range_round_to_int: bool | None = kinds.flag()

    # Attention.
    add_qkv_bias: bool | None = kinds.flag()
    qk_layernorm: bool | None = kinds.flag()
    qk_l2_norm: bool | None = kinds.flag()
    attention_output_gate: bool | None = kinds.flag()
    attention_dropout: float | None = kinds.number()
    attention_softcap: float | None = kinds.number()
    softmax_type: str | None = kinds.text()
    softmax_scale: float | None = kinds.number()
    window_size: Sequence[int] | None = kinds.window()
    window_attn_skip_freq: int | Sequence[int] | None = kinds.frequency()
    experimental_attention_variant: str | None = kinds.text()
    linear_attention_freq: int | Sequence[int] | None = kinds.frequency()
    linear_conv_kernel_dim: int | None = kinds.whole(_MOST_ELEMENTS)
    linear_key_head_dim: int | None = kinds.whole(_MOST_ELEMENTS)
    linear_value_head_dim: int | None = kinds.whole(_MOST_ELEMENTS)
    linear_num_key_heads: int | None = kinds.whole(MOST_EXPERTS)
    linear_num_value_heads: int | None = kinds.whole(MOST_EXPERTS)
    dsa_indexer_n_heads: int | None = kinds.whole(MOST_EXPERTS)
    dsa_indexer_head_dim: int | None = kinds.whole(_MOST_ELEMENTS)
    dsa_indexer_topk: int | None = kinds.whole(_MOST_ELEMENTS)
    dsa_indexer_topk_freq: int | None = kinds.whole(MOST_LAYERS)
    dsa_indexer_skip_topk_offset: int | None = kinds.whole(MOST_LAYERS)
    dsa_indexer_rope_interleaved: bool | None = kinds.flag()
    dsa_indexer_rotate_activation: bool | None = kinds.flag()
    dsa_indexer_scoring_relu: bool | None = kinds.flag()
    dsa_indexer_k_norm_epsilon: float | None = kinds.not_negative()
    dsa_indexer_k_norm_fp32: bool | None = kinds.flag()
    multi_latent_attention: bool | None = kinds.flag()
    q_lora_rank: int | None = kinds.whole(_MOST_ELEMENTS)
    kv_lora_rank: int | None = kinds.whole(_MOST_ELEMENTS)
    qk_head_dim: int | None = kinds.whole(_MOST_ELEMENTS)
    qk_pos_emb_head_dim: int | None = kinds.whole(_MOST_ELEMENTS)
    v_head_dim: int | None = kinds.whole(_MOST_ELEMENTS)

    # The MLP.
    swiglu: bool | None = kinds.flag()
    squared_relu: bool | None = kinds.flag()
    quick_geglu: bool | None = kinds.flag()
    openai_gelu: bool | None = kinds.flag()
    gated_linear_unit: bool | None = kinds.flag()
    glu_linear_offset: float | None = kinds.number()
    activation_func_clamp_value: float | None = kinds.number()
    bias_gelu_fusion: bool | None = kinds.flag()

    # Experts.
    num_experts: int | None = kinds.whole(MOST_EXPERTS)
    moe_layer_freq: int | Sequence[int] | None = kinds.frequency()
    moe_ffn_hidden_size: int | None = kinds.whole(_MOST_ELEMENTS)
    moe_grouped_gemm: bool | None = kinds.flag()
    moe_use_legacy_grouped_gemm: bool | None = kinds.flag()
    moe_router_topk: int | None = kinds.whole(MOST_EXPERTS)
    moe_router_pre_softmax: bool | None = kinds.flag()
    moe_router_score_function: str | None = kinds.text()
    moe_router_enable_expert_bias: bool | None = kinds.flag()
    moe_router_num_groups: int | None = kinds.whole(MOST_EXPERTS)
    moe_router_group_topk: int | None = kinds.whole(MOST_EXPERTS)
    moe_router_topk_scaling_factor: float | None = kinds.number()
    moe_shared_expert_intermediate_size: int | None = kinds.whole(_MOST_ELEMENTS)
    moe_shared_expert_gate: bool | None = kinds.flag()
    moe_aux_loss_coeff: float | Sequence[float] | None = kinds.numbers()

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if "kind" in one.metadata and value is not None and not one.metadata["kind"].accepts(value):
                raise self._refused(one.name, _shown(value), one.metadata["kind"].expected)
        layers, pattern = self.num_layers or 0, self.moe_layer_freq
        if layers * (self.num_experts or 0) > _MOST_EXPERTS_IN_ALL:
            raise self._refused("num_experts", f"{self.num_experts} in each of {layers} layers", "far fewer in all")
        if isinstance(pattern, Sequence) and len(pattern) < layers:
            raise self._refused("moe_layer_freq", f"{len(pattern)} items", f"one for each of {layers} layers")

    @classmethod
    def of(
        cls,
        stated: Mapping[str, Any],
        *,
        source: str = "the arguments of the job",
        version: Version | None = None,
        tells_all: bool = True,
    ) -> JobArguments:
        """From Megatron's parsed arguments, or anything else with its names; what has no field is kept in `stated`.

        Args:
            stated: values by name.
            source: what states them.
            version: the release of Megatron Core that wrote the source, where that is recorded.
            tells_all: the source has every argument of its job.

        Raises:
            UnreadableCheckpointError: an argument has a value that no job can have.
        """
        known = {name: stated[name] for name in FIELDS if name in stated}
        return cls(stated=MappingProxyType(dict(stated)), source=source, version=version, tells_all=tells_all, **known)

    def is_known(self, name: str) -> bool:
        """Whether the source states an argument, be it None."""
        return name in self.stated

    def lacks(self, name: str) -> bool:
        """Whether the version of the job did not have an argument yet; not where a source merely keeps it to itself."""
        return self.tells_all and name not in self.stated

    def value(self, name: str) -> Any:
        """An argument that a table names; None where it is not known.

        Raises:
            UnsupportedCheckpointError: nothing here looks at it, and the source does not state it either.
        """
        if name in FIELDS:
            return getattr(self, name)
        if name not in self.stated:
            raise UnsupportedCheckpointError("no argument of that name is known", found=name, where=self.source)
        return self.stated[name]

    def whole(self, name: str) -> int:
        """An argument that must be known, and a whole number.

        Raises:
            UnsupportedCheckpointError: the source does not state it.
        """
        value = self.value(name)
        if not is_whole(value):
            raise UnsupportedCheckpointError("an argument of the job is not known", expected=name, where=self.source)
        return int(value)

    @property
    def layer_counts(self) -> set[int]:
        """How many layers the model has, as far as it is known; an encoder and a decoder may have different numbers."""
        stated = (self.num_layers, *(self.stated.get(name) for name in ("encoder_num_layers", "decoder_num_layers")))
        return {count for count in stated if isinstance(count, int)}

    @property
    def tokens(self) -> int | None:
        """Tokens of the vocabulary without padding; None where a tokenizer said how many."""
        if not self.vocab_size:
            return None
        # Up to 0.17 the end of a document was one more (null_tokenizer.py).
        null = self.tokenizer_type == "NullTokenizer"
        return self.vocab_size + (null and not self.is_known("null_tokenizer_pad_id"))

    @property
    def constant_batch_size(self) -> int | None:
        """Samples of an iteration where all had as many; None where it is not known, or grew (`rampup_batch_size`)."""
        return None if self.rampup_batch_size else self.global_batch_size

    def changed(self, *, source: str | None = None, **changes: Any) -> JobArguments:
        """The arguments of a job with these values in place of the present ones; `source`: what states them now."""
        return JobArguments.of(
            {**self.stated, **changes}, source=source or self.source, version=self.version, tells_all=self.tells_all
        )

    def _refused(self, name: str, found: str, expected: str) -> UnreadableCheckpointError:
        return UnreadableCheckpointError(
            "an argument of the job has a value that it cannot have",
            found=f"{name}: {found}",
            expected=expected,
            where=self.source,
        )


FIELDS = frozenset(one.name for one in fields(JobArguments) if "kind" in one.metadata)
"""The names of all arguments that are looked at."""


def _shown(value: Any) -> str:
    """A value in a message, whatever it is: of a stranger's object no more than its type, of a number its size."""
    if is_whole(value) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length():,} bits"
    return repr(value)[:80] if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def is_hybrid(arguments: JobArguments) -> bool:
    """Whether a pattern says of each layer which mixer it has (core_v0.9.0 to 0.19.2, by either name)."""
    return bool(arguments.hybrid_layer_pattern or arguments.stated.get("hybrid_override_pattern"))
