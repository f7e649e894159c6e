"""The sizes of a model's layers that its activations depend on, from the arguments of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mcore_ckpt_ext.job.hybrid_pattern import is_hybrid, layer_pattern
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import is_gated


class Part(Enum):
    """A part of a decoder layer, as `--hybrid-layer-pattern` spells it.

    Source: megatron/core/ssm/mamba_hybrid_layer_allocation.py, core_v0.12.0 to 0.19.2.
    `LINEAR_ATTENTION` is a gated delta net, which takes the place of attention in a GPT layer.
    """

    ATTENTION = "*"
    MAMBA = "M"
    LINEAR_ATTENTION = "G"
    FEED_FORWARD = "-"
    EXPERTS = "E"


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of one model; 0 where it has no such part, or where the size is unknown.

    Attributes:
        layers: the parts of each decoder layer.
        query: width of all query heads of a layer.
        key: width of all key heads of a layer; values are as wide, except in latent attention.
        value: width of the output of all attention heads.
        heads: number of attention heads.
        query_rank: width of the compressed queries of latent attention.
        key_rank: width of the compressed keys of latent attention, with their rotary part.
        is_latent: whether attention is latent (`--multi-latent-attention`).
        rotates: whether positions are rotary, which keeps rotated copies of queries and keys.
        normalizes: whether queries and keys are normalized (`--qk-layernorm`, `--qk-l2-norm`).
        gates_output: whether the output of attention has a gate, which is projected with the queries.
        gates: 2 if the first projection of an MLP also contains a gate, otherwise 1.
        expert_width: width of what experts take, `hidden` or `--moe-latent-size`.
        mamba_input: width of the input projection's result in a Mamba layer.
        mamba_inner: width of a Mamba layer's state space.
        linear_key: width of all key heads of linear attention.
        linear_value: width of all value heads of linear attention.
        linear_value_heads: number of value heads of linear attention.
        predicted: number of layers for multi-token prediction.
    """

    hidden: int
    layers: tuple[tuple[Part, ...], ...]
    query: int
    key: int
    value: int
    heads: int
    query_rank: int
    key_rank: int
    is_latent: bool
    rotates: bool
    normalizes: bool
    gates_output: bool
    feed_forward: int
    gates: int
    experts: int
    experts_per_token: int
    expert_feed_forward: int
    expert_width: int
    shared_feed_forward: int
    mamba_input: int
    mamba_inner: int
    linear_key: int
    linear_value: int
    linear_value_heads: int
    predicted: int

    @classmethod
    def of(cls, job: JobArguments) -> ModelSizes:
        """Return the sizes of a job's model."""
        hidden = job.hidden_size or 0
        heads = job.num_attention_heads or 0
        channels = job.kv_channels or hidden // max(heads, 1)
        groups = (job.num_query_groups or heads) if job.group_query_attention else heads
        query = value = channels * heads
        key = channels * groups
        rotated = job.qk_pos_emb_head_dim or 64
        is_latent = bool(job.multi_latent_attention)
        if is_latent:
            query = key = heads * ((job.qk_head_dim or 128) + rotated)
            value = heads * (job.v_head_dim or 128)
        inner = 0
        if is_hybrid(job):
            inner = (job.mamba_num_heads or 0) * (job.mamba_head_dim or 64) or 2 * hidden
        states = 2 * (job.mamba_num_groups or 8) * (job.mamba_state_dim or 128)
        feed_forward = job.ffn_hidden_size or 4 * hidden
        is_delta_net = job.experimental_attention_variant == "gated_delta_net"
        return cls(
            hidden=hidden,
            layers=_layers(job),
            query=query * (2 if job.attention_output_gate else 1),
            key=key,
            value=value,
            heads=heads,
            query_rank=(job.q_lora_rank or 0) if is_latent else 0,
            key_rank=(job.kv_lora_rank or 32) + rotated if is_latent else 0,
            is_latent=is_latent,
            rotates=is_latent or job.position_embedding_type in ("rope", "yarn", "mrope"),
            normalizes=bool(job.qk_layernorm or job.raw.get("qk_l2_norm")),
            gates_output=bool(job.attention_output_gate),
            feed_forward=feed_forward,
            gates=2 if is_gated(job) else 1,
            experts=job.num_experts or 0,
            experts_per_token=job.moe_router_topk or 2,
            expert_feed_forward=job.moe_ffn_hidden_size or feed_forward,
            expert_width=number_of(job, "moe_latent_size", 0) or hidden,
            shared_feed_forward=job.moe_shared_expert_intermediate_size or 0,
            mamba_input=2 * inner + states + inner // (job.mamba_head_dim or 64) if inner else 0,
            mamba_inner=inner,
            linear_key=_linear_width(job, "key", 16) if is_delta_net else 0,
            linear_value=_linear_width(job, "value", 32) if is_delta_net else 0,
            linear_value_heads=number_of(job, "linear_num_value_heads", 32) if is_delta_net else 0,
            predicted=job.mtp_num_layers or 0,
        )


def number_of(job: JobArguments, name: str, default: int) -> int:
    """Return a whole number among a job's arguments, or `default` if it is unset or something else."""
    value = job.raw.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default


def fraction_of(job: JobArguments, name: str, default: float) -> float:
    """Return a number among a job's arguments, or `default` if it is unset or something else."""
    value = job.raw.get(name)
    return float(value) if isinstance(value, (int, float)) and value >= 0 else default


def _linear_width(job: JobArguments, kind: str, heads: int) -> int:
    return number_of(job, f"linear_num_{kind}_heads", heads) * number_of(job, f"linear_{kind}_head_dim", 128)


def _layers(job: JobArguments) -> tuple[tuple[Part, ...], ...]:
    """Return the parts of each decoder layer.

    Sources: `get_gpt_decoder_layer_specs` (models/gpt/gpt_layer_specs.py), `is_linear_attention_layer`
    (models/gpt/experimental_attention_variant_module_specs.py), core_v0.16.0 to 0.19.2.
    """
    if is_hybrid(job):
        parts_by_letter = {part.value: part for part in Part}
        letters = layer_pattern(job).replace("|", "")
        return tuple((parts_by_letter.get(letter, Part.FEED_FORWARD),) for letter in letters)
    return tuple((_mixer(job, layer), _feed_forward(job, layer)) for layer in range(job.num_layers or 0))


def _mixer(job: JobArguments, layer: int) -> Part:
    if job.experimental_attention_variant != "gated_delta_net":
        return Part.ATTENTION
    frequency = job.linear_attention_freq
    if isinstance(frequency, Sequence):
        is_linear = bool(frequency[layer]) if layer < len(frequency) else False
    else:
        is_linear = (layer + 1) % (frequency if isinstance(frequency, int) and frequency else 4) != 0
    return Part.LINEAR_ATTENTION if is_linear else Part.ATTENTION


def _feed_forward(job: JobArguments, layer: int) -> Part:
    frequency = job.moe_layer_freq
    if not job.num_experts:
        return Part.FEED_FORWARD
    if isinstance(frequency, Sequence):
        return Part.EXPERTS if frequency[layer] else Part.FEED_FORWARD
    return Part.EXPERTS if layer % (frequency or 1) == 0 else Part.FEED_FORWARD
