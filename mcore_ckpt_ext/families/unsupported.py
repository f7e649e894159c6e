"""Model types that Megatron Core does not support, with the reason.

The documentation has the same table.

Sources: the classes of transformers 5.23, and the released code of types without one; `TransformerConfig` and its
checks, the choices of `--position-embedding-type`, and the layers below megatron/core/transformer, of core_v0.19.2 and
the development head of August 2026.
"""

from __future__ import annotations

from collections.abc import Mapping

PARALLEL_BLOCKS = (
    "attention and MLP of a layer read the same input (parallel blocks), and in Megatron one follows the other"
)
NORMS_BEHIND = "it norms what comes out of a block, and Megatron only what goes into it"
FACTORS = (
    "it multiplies what each block adds to the residual by a factor; those of --use-mup are for embeddings and logits"
)
CHUNKS = "its attention sees chunks, and its queries have a temperature, for which Megatron has no arguments"
ALIBI = "its attention has linear biases (ALiBi) instead of positions, and Megatron has none"
CLIPPED = "it clips queries, keys and values, and Megatron does not"
MAMBA_1 = "its mixers are those of the first Mamba, and Megatron's of the second"
NORMS_AFTER_ROPE = "it norms queries and keys after they are rotated, and Megatron before"
CROSS_ATTENTION = "some of its layers attend to images (cross-attention), and those of Megatron's GPT model do not"
ENCODER = "it has an encoder and a decoder, and Megatron's T5 scales attention otherwise"
_STREAMS = "its residual has several streams (AltUp), and each of its layers an embedding of its own"
_LAYERS_DIFFER = "the number of heads, or their size, differs between its layers, and in Megatron it is one"
_COMPRESSED = (
    "its attention compresses keys and values, and a hash of the token chooses experts in some layers: Megatron Core "
    "has neither"
)
_KDA = "its linear attention is Kimi's delta attention (KDA), and Megatron's are gated delta nets"
_LIGHTNING = "its linear attention is lightning attention, which Megatron does not have"
_SELECTED = "it attends to blocks that an indexer selects; Megatron's indexer selects tokens of latent attention"
_CONVOLUTIONS = "most of its layers are short convolutions with gates, which Megatron does not have"
NOT_IN_MEGATRON: Mapping[str, str] = {
    "falcon": PARALLEL_BLOCKS,
    "RefinedWeb": PARALLEL_BLOCKS,
    "RefinedWebModel": PARALLEL_BLOCKS,
    "gptj": PARALLEL_BLOCKS,
    "codegen": PARALLEL_BLOCKS,
    "phi": PARALLEL_BLOCKS,
    "phi-msft": PARALLEL_BLOCKS,
    "cohere": PARALLEL_BLOCKS,
    "cohere2": PARALLEL_BLOCKS,
    "bloom": ALIBI,
    "mpt": ALIBI,
    "glm4": NORMS_BEHIND,
    "glm4v": NORMS_BEHIND,
    "glm4v_text": NORMS_BEHIND,
    "olmo2": NORMS_BEHIND,
    "olmo3": NORMS_BEHIND,
    "afmoe": NORMS_BEHIND,
    "granite": FACTORS,
    "granitemoe": FACTORS,
    "granitemoeshared": FACTORS,
    "granitemoehybrid": FACTORS,
    "minicpm": FACTORS,
    "minicpm3": FACTORS,
    "llama4": CHUNKS,
    "llama4_text": CHUNKS,
    "gemma3n": _STREAMS,
    "gemma3n_text": _STREAMS,
    "gemma4": _LAYERS_DIFFER,
    "gemma4_text": _LAYERS_DIFFER,
    "step3p5": _LAYERS_DIFFER,
    "step3p7": _LAYERS_DIFFER,
    "deepseek_v4": _COMPRESSED,
    "deepseek_ref": _COMPRESSED,
    "kimi_linear": _KDA,
    "kimi_k3": _KDA,
    "minimax": _LIGHTNING,
    "minimax_text_01": _LIGHTNING,
    "bailing_hybrid": _LIGHTNING,
    "bailing_moe_linear": _LIGHTNING,
    "minimax_m3": _SELECTED,
    "minimax_m3_vl": _SELECTED,
    "minimax_m3_vl_text": _SELECTED,
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "lfm2_vl": _CONVOLUTIONS,
    "laguna": "a projection of its own, by softplus, gates what comes out of each head, and the gates of Megatron's "
    "attention are sigmoids of rows beside the queries",
    "phi3small": "every other layer attends to some blocks of tokens (block-sparse), and no layer of Megatron does",
    "falcon_h1": "attention and a Mamba mixer of a layer read the same input, and in Megatron a layer has one of them",
    "t5": ENCODER,
    "mt5": ENCODER,
    "mllama": CROSS_ATTENTION,
    "mllama_text_model": CROSS_ATTENTION,
    "phi4mm": "adapters for images and speech lie in each of its layers, and its RoPE scales each frequency (longrope)",
    "internlm": "with bias: true its attention has a bias behind it and its MLP none, and Megatron has biases in both "
    "or in neither; with bias: false it computes as Llama: --family Llama --accept-key bias",
    "hunyuan_v1_dense": NORMS_AFTER_ROPE,
    "hunyuan_v1_moe": NORMS_AFTER_ROPE,
    "dbrx": CLIPPED,
    "mamba": MAMBA_1,
    "falcon_mamba": MAMBA_1,
    "jamba": MAMBA_1,
    "baichuan": "Baichuan 2 computes logits by an output layer whose rows it normalizes first, and Megatron does not; "
    "with these rows normalized once, and W_pack cut into queries, keys and values, 7B computes as Llama",
    "mimo_v2_flash": "values of a head are narrower than its keys; in Megatron, only those of latent attention are",
    "olmo": "its norms have no weights, and those of Megatron do",
    "opt": "its MLP has ReLU, for which Megatron has no flag, and its positions begin at 2",
    "apertus": "its MLP has xIELU, for which Megatron has no flag",
    "phimoe": "its routers draw experts one after the other (sparsemixer), and its output layer may have a bias",
    "ernie4_5_moe": "a bias chooses its experts by softmax, and Megatron's routers have one for sigmoid and "
    "sqrtsoftplus only",
    "sarvam_mla": "a token's 8 experts are of 2 groups; it ranks groups by their best 2 experts, and Megatron by their "
    "best 4",
}
"""By `model_type`: models that no release of Megatron Core up to 0.19.2, nor the development head, has."""
