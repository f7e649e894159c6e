"""Estimates the bytes of activations that a layer keeps for its backward pass, term by term.

Source of the method: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198), section 4, which counts the tensors that each operation saves; the same terms are in
megatron/training/theoretical_memory_usage.py (core_v0.12.0 to 0.19.2): `s b h (10 + 24 / TP)` for a layer without
grouped queries, with dropout and an MLP of 4 h. Here each tensor is a term of its own, because models since then have
grouped queries, gated MLPs, latent attention, experts and state spaces. Tensors of the residual stream are divided
among tensor-parallel ranks only with sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mcore_ckpt_ext.layout_choice.activation_options import ActivationOptions
from mcore_ckpt_ext.layout_choice.model_sizes import ModelSizes, Part


@dataclass(frozen=True, slots=True)
class Shares:
    """The tokens of one micro batch on a rank, and how many ranks divide what.

    Attributes:
        length: tokens of one sequence on a context-parallel rank.
        samples: the micro batch.
        tensor: tensor parallel size.
        expert_tensor: tensor parallel size of experts.
        residual: ranks that divide the residual stream: `tensor` with sequence parallelism, otherwise 1.
        expert: expert parallel size.
    """

    length: int
    samples: int
    tensor: int
    expert_tensor: int
    residual: int
    expert: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch on the ranks that share tensors."""
        return self.length * self.samples

    def routed_tokens(self, sizes: ModelSizes, capacity: float) -> float:
        """Return the tokens that the experts of a rank process, with balanced routing.

        Every rank of the expert-parallel and the expert-tensor-parallel group sends each of its tokens to
        `--moe-router-topk` experts; ranks that divide an expert all get its tokens (`MoEAlltoAllTokenDispatcher`,
        megatron/core/transformer/moe/token_dispatcher.py, core_v0.10.0 to 0.19.2).
        """
        sent = self.tokens / (self.tensor if self.residual > 1 else 1)
        return sent * sizes.experts_per_token * self.expert_tensor * capacity


@dataclass(frozen=True)
class LayerTerms:
    """Bytes of one micro batch for one part of a layer.

    Attributes:
        terms: what the part keeps without recomputation, by name.
        dropped: the terms that recomputation drops, and computes again in the backward pass.
        gradient: the largest gradients of activations that the backward pass of the part holds at once.
    """

    terms: dict[str, float]
    dropped: frozenset[str]
    gradient: float

    @cached_property
    def whole(self) -> float:
        """Bytes without recomputation."""
        return sum(self.terms.values())

    @cached_property
    def kept(self) -> float:
        """Bytes that stay until the backward pass."""
        return sum(value for name, value in self.terms.items() if name not in self.dropped)

    @property
    def recomputed(self) -> float:
        """Bytes that the backward pass computes again."""
        return self.whole - self.kept


def terms_of(part: Part, sizes: ModelSizes, options: ActivationOptions, shares: Shares) -> LayerTerms:
    """Return the terms of one part of a layer."""
    stream = shares.tokens * sizes.hidden / shares.residual
    terms = {"residual input": 2 * stream, "norm output": options.linear_input * stream}
    if options.has_dropout:
        terms["dropout mask"] = stream
    more, dropped, gradient = _PARTS[part](sizes, options, shares)
    more = {name: value for name, value in more.items() if name not in options.offloaded}
    if "layernorm" in options.modules:
        dropped = {*dropped, "norm output"}
    return LayerTerms({**terms, **more}, frozenset(dropped), gradient + 2 * stream)


_Terms = tuple[dict[str, float], set[str], float]


def _attention(sizes: ModelSizes, options: ActivationOptions, shares: Shares) -> _Terms:
    """Self-attention: the projection of queries, keys and values, their rotated copies, and the output.

    Sources: `Attention.forward` (megatron/core/transformer/attention.py), and `get_qkv_layout`
    (transformer_engine/pytorch/attention/dot_product_attention/utils.py, v1.3 to v2.18). Values are a view of the
    projection. The strides of rotated keys differ from theirs, so the fused kernels take a copy of the values, and the
    projection is freed, unless something else is a view of it, or the inputs of a recomputed kernel are kept.
    """
    tokens = shares.tokens
    ranks = shares.tensor
    heads = sizes.heads / ranks
    terms = {
        "attention output": 2 * tokens * sizes.value / ranks,
        "softmax statistics": 4 * tokens * heads,
    }
    if options.linear_input == 1:
        terms["quantized attention output"] = tokens * sizes.value / ranks
    dropped = set()
    if options.stores_scores:
        # Softmax, its dropout mask and its output: 2 + 1 + 2 bytes.
        terms["scores"] = 5.0 * tokens * shares.length * heads
        if "core_attn" in options.modules:
            dropped.add("scores")
    if sizes.is_latent:
        return _latent(sizes, options, shares, terms, dropped)
    if sizes.rotates:
        terms["rotated queries and keys"] = 2 * tokens * (sizes.query + sizes.key) / ranks
    if sizes.rotates and not (options.stores_scores or sizes.gates_output or "core_attn" in options.modules):
        terms["values"] = 2 * tokens * sizes.key / ranks
        if sizes.normalizes:
            terms["queries and keys before their norms"] = 2 * tokens * (sizes.query + sizes.key) / ranks
    else:
        terms["queries, keys and values"] = 2 * tokens * (sizes.query + 2 * sizes.key) / ranks
    return terms, dropped, 2 * tokens * (sizes.query + 2 * sizes.key + sizes.value) / ranks


def _latent(
    sizes: ModelSizes, options: ActivationOptions, shares: Shares, terms: dict[str, float], dropped: set[str]
) -> _Terms:
    """Multi-latent attention: compressed queries and keys, and what is projected up from them.

    Source: `MLASelfAttention.get_query_key_value_tensors` (megatron/core/transformer/multi_latent_attention.py,
    core_v0.12.0 to 0.19.2); `mla_up_proj` recomputes what follows the compressed tensors.
    """
    tokens = shares.tokens
    ranks = shares.tensor
    terms["compressed queries and keys"] = 4 * tokens * (sizes.query_rank + sizes.key_rank) / shares.residual
    terms["queries, keys and values"] = 2 * tokens * (sizes.query + sizes.key + sizes.value) / ranks
    # The projections, before rotary positions are joined to them.
    terms["projected queries and keys"] = 2 * tokens * (sizes.query + sizes.key) / ranks
    if "mla_up_proj" in options.modules:
        dropped |= {"queries, keys and values", "projected queries and keys"}
    return terms, dropped, 2 * tokens * (sizes.query + sizes.key + 2 * sizes.value) / ranks


def _linear_attention(sizes: ModelSizes, options: ActivationOptions, shares: Shares) -> _Terms:
    """Gated delta net: projection, normalized queries and keys, arguments of the kernel, and output.

    Sources: `GatedDeltaNet.forward` (megatron/core/ssm/gated_delta_net.py, core_v0.16.0 to 0.19.2), which repeats
    queries and keys for all heads of values; `ChunkGatedDeltaRuleFunction` (fla/ops/gated_delta_rule/chunk.py), which
    keeps what it takes and a matrix of 64 columns for each head; `L2NormFunction` (fla/modules/l2norm.py). The output's
    gate multiplies its norm, so that autograd keeps the norm.
    """
    tokens = shares.tokens
    ranks = shares.tensor
    key = sizes.linear_key
    value = sizes.linear_value
    mixed = 2 * key + value
    terms = {
        "projection": 2 * tokens * (mixed + value) / ranks,
        "normalized queries and keys": 2 * tokens * 2 * key / ranks,
        "queries, keys and values": 2 * tokens * (2 * value + value) / ranks,
        "kernel": 2 * tokens * 64 * sizes.linear_value_heads / ranks,
        "output": 2 * tokens * value / ranks,
        "norm of the output": (2 + options.linear_input) * tokens * value / ranks,
    }
    dropped = {"norm of the output"} if "gdn_norm_out" in options.modules else set()
    return terms, dropped, 2 * tokens * (mixed + 2 * value) / ranks


def _mamba(sizes: ModelSizes, options: ActivationOptions, shares: Shares) -> _Terms:
    """Mamba: the projection, from which the scan recomputes the rest, and its outputs.

    Source: `MambaMixer._ssm_training` (megatron/core/ssm/mamba_mixer.py, core_v0.12.0 to 0.19.2),
    `MambaSplitConv1dScanCombinedFn` (mamba_ssm/ops/triton/ssd_combined.py, v2.2.6 to v2.3.2). The scan keeps its output
    before the gate, the norm that after it, and the second projection that of the norm.
    """
    tokens = shares.tokens
    ranks = shares.tensor
    terms = {
        "projection": 2 * tokens * sizes.mamba_input / ranks,
        "output before and after the gate": 4 * tokens * sizes.mamba_inner / ranks,
        "norm of the output": options.linear_input * tokens * sizes.mamba_inner / ranks,
    }
    return terms, set(), 2 * tokens * (sizes.mamba_input + sizes.mamba_inner) / ranks


def _feed_forward(sizes: ModelSizes, options: ActivationOptions, shares: Shares) -> _Terms:
    """MLP: the result of the first projection, and the input of the second one.

    Source: `MLP.forward` (megatron/core/transformer/mlp.py).
    """
    width = shares.tokens * sizes.feed_forward / shares.tensor
    terms = {"first projection": 2 * sizes.gates * width, "activation": options.linear_input * width}
    dropped = set(terms) if "mlp" in options.modules else set()
    return terms, dropped, 2 * (sizes.gates + 1) * width


_OF_ROUTED_TOKENS = ("arrived tokens", "first projection of experts", "activation of experts")


def _experts(sizes: ModelSizes, options: ActivationOptions, shares: Shares) -> _Terms:
    """Experts: the tokens that arrive, both projections, shared experts, and the router in fp32.

    Source: `MoELayer.forward` (megatron/core/transformer/moe/moe_layer.py), `TEGroupedMLP.forward` (experts.py), and
    `TopKRouter` (router.py), core_v0.12.0 to 0.19.2. The probabilities are applied in the experts' activation, so
    their output is not kept.
    """
    routed = shares.routed_tokens(sizes, options.capacity)
    width = sizes.expert_feed_forward / shares.expert_tensor
    shared = shares.tokens * sizes.shared_feed_forward / shares.tensor
    sent = shares.tokens / shares.residual
    terms = {
        "arrived tokens": options.linear_input * routed * sizes.expert_width,
        "first projection of experts": 2 * sizes.gates * routed * width,
        "activation of experts": options.linear_input * routed * width,
        "router": sent * sizes.experts * (4 + 4 + 1),
    }
    if sizes.shared_feed_forward:
        terms["shared experts"] = (2 * sizes.gates + options.linear_input) * shared
    if sizes.expert_width != sizes.hidden:
        terms["latent tokens"] = 2 * 2 * sent * sizes.expert_width
    dropped = {"activation of experts"} if "moe_act" in options.modules else set()
    if "shared_experts" in options.modules:
        dropped.add("shared experts")
    if "moe" in options.modules:
        dropped = set(terms)
    # Tokens are permuted before they are sent and after they have arrived, forward and back.
    gradient = 2 * routed * (2 * sizes.expert_width + (sizes.gates + 1) * width)
    # One layer's tokens may be on few ranks, while the sum over layers is about the same on all of them.
    excess = max(min(options.fullest, shares.expert) - 1, 0)
    gradient += excess * (gradient + sum(terms[name] for name in _OF_ROUTED_TOKENS))
    return terms, dropped, gradient


_PARTS = {
    Part.ATTENTION: _attention,
    Part.LINEAR_ATTENTION: _linear_attention,
    Part.MAMBA: _mamba,
    Part.FEED_FORWARD: _feed_forward,
    Part.EXPERTS: _experts,
}
