"""Megatron arguments that turn the tiny GPT (`megatron_on_cpu.toy_jobs`) into other models."""

from __future__ import annotations

GATED = ["--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"]
GATED += ["--untie-embeddings-and-output-weights"]
QUERIES = ["--group-query-attention", "--num-query-groups", "2"]
LLAMA = [*GATED, *QUERIES]

EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"]
GATED_EXPERTS = [*GATED, *EXPERTS]
SHARED_EXPERTS = ["--moe-shared-expert-intermediate-size", "32", "--moe-layer-freq", "[0,1,1,1]"]
EXPERT_BIAS = ["--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"]

LATENT = [*GATED, "--multi-latent-attention", "--q-lora-rank", "16", "--kv-lora-rank", "16", "--qk-head-dim", "8"]
LATENT += ["--qk-pos-emb-head-dim", "8", "--v-head-dim", "8", "--qk-layernorm"]


def experts(parallel: int, *more: str) -> list[str]:
    """Return the arguments of a model with experts, on this number of expert-parallel ranks."""
    return [*GATED_EXPERTS, *more, "--expert-model-parallel-size", str(parallel)]
