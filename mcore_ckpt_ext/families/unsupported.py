"""Families that Megatron Core builds no model of, with the reason; the documentation's table is made of this one.

Sources: the classes of transformers 5.23, and the released code of types without one; `TransformerConfig` and its
checks, the choices of `--position-embedding-type`, and the layers below megatron/core/transformer, of core_v0.19.2 and
the development head of August 2026.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mcore_ckpt_ext.families.config_keys import WITHOUT_EFFECT
from mcore_ckpt_ext.families.family import Family

PARALLEL_BLOCKS = (
    "attention and MLP of a layer read the same input (parallel blocks), and in Megatron one follows the other"
)
_NORMS_BEHIND = "it norms what comes out of a block, and Megatron what goes into it"
_FACTORS = (
    "it multiplies what each block adds to the residual by a factor; those of --use-mup are for embeddings and logits"
)
_CHUNKS = "its attention sees chunks, and its queries have a temperature, for which Megatron has no arguments"
_ALIBI = "its attention has linear biases (ALiBi) instead of positions, and Megatron has none"
_CLIPPED = "it clips queries, keys and values, and Megatron does not"
_MAMBA_1 = "its mixers are those of the first Mamba, and Megatron's of the second"
_NORMS_AFTER_ROPE = "it norms queries and keys after they are rotated, and Megatron before"
NOT_IN_MEGATRON: Mapping[str, str] = {
    "falcon": PARALLEL_BLOCKS, "gptj": PARALLEL_BLOCKS, "codegen": PARALLEL_BLOCKS, "phi": PARALLEL_BLOCKS,
    "phi-msft": PARALLEL_BLOCKS, "cohere": PARALLEL_BLOCKS, "cohere2": PARALLEL_BLOCKS,
    "bloom": _ALIBI, "mpt": _ALIBI,
    "glm4": _NORMS_BEHIND, "olmo2": _NORMS_BEHIND, "olmo3": _NORMS_BEHIND, "exaone4": _NORMS_BEHIND,
    "afmoe": _NORMS_BEHIND, "gemma3n_text": _NORMS_BEHIND, "gemma4_text": _NORMS_BEHIND,
    "granite": _FACTORS, "granitemoe": _FACTORS, "minicpm": _FACTORS, "minicpm3": _FACTORS, "falcon_h1": _FACTORS,
    "llama4": _CHUNKS, "llama4_text": _CHUNKS,
    "hunyuan_v1_dense": _NORMS_AFTER_ROPE, "hunyuan_v1_moe": _NORMS_AFTER_ROPE,
    "dbrx": _CLIPPED, "mamba": _MAMBA_1, "falcon_mamba": _MAMBA_1, "jamba": _MAMBA_1,
    "baichuan": "Baichuan 2 computes logits by an output layer whose rows it normalizes first, and Megatron does not",
    "mimo_v2_flash": "values of a head are narrower than its keys; in Megatron, only those of latent attention are",
    "olmo": "its norms have no weights, and those of Megatron do",
    "opt": "its MLP has ReLU, for which Megatron has no flag, and its positions begin at 2",
    "apertus": "its MLP has xIELU, for which Megatron has no flag",
    "phimoe": "its routers draw experts one after the other (sparsemixer), and its output layer may have a bias",
    "ernie4_5_moe": "a bias chooses its experts by softmax, and Megatron's routers have one for sigmoids only",
}  # fmt: skip
"""By `model_type`: neither a release of Megatron Core up to 0.19.2 nor the development head has such a model."""
_NEAREST, _SHOWN = 3, 6


def nearest_families(config: Mapping[str, object], families: Iterable[Family]) -> list[tuple[Family, list[str]]]:
    """The families that map most keys of a `config.json`, each with the keys that it does not map."""
    stated = {key for key, value in config.items() if value is not None} - WITHOUT_EFFECT
    found = []
    for family in families:
        unmapped = sorted(stated - family.mapped_keys)
        lacking = {key for setting in family.settings for key in setting.keys} - config.keys()
        found.append((len(unmapped), len(lacking), family, unmapped))
    found.sort(key=lambda one: one[:2])
    return [(family, unmapped) for _, _, family, unmapped in found[:_NEAREST]]


def describe_nearest(nearest: Sequence[tuple[Family, list[str]]]) -> str:
    """The nearest families, and the keys that keep a model from being one of them."""
    return "; ".join(
        f"{family.name}, but for {', '.join(unmapped[:_SHOWN])}"
        + (f" and {len(unmapped) - _SHOWN} more" if len(unmapped) > _SHOWN else "")
        if unmapped else f"{family.name}, which maps all its keys"
        for family, unmapped in nearest
    )  # fmt: skip
