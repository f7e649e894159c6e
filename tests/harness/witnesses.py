"""The tiny models that are compared with real Megatron, and their layouts, for tests and documentation."""

from __future__ import annotations

from dataclasses import dataclass

LAYOUTS: dict[str, tuple[int, int]] = {"TP1": (1, 1), "TP2": (2, 1), "EP2": (1, 2)}
"""Tensor and expert parallel size on two ranks."""
_DENSE, _EXPERTS = ("TP1", "TP2"), ("TP1", "TP2", "EP2")
_INDEXED = ("TP1", "EP2")  # Megatron shards the indexer across tensor-parallel ranks with sequence parallelism only


@dataclass(frozen=True)
class Shown:
    """A model of `tests/harness/huggingface.py`.

    Attributes:
        model_type: the type of its family.
        layouts: the layouts under which its logits are compared, with the local layer spec.
        engine: the layouts with Transformer Engine's spec.
        bridge: the layouts under which it is compared in Megatron-Bridge's own model (`tests/slow`).
        why: why no logits are compared.
    """

    model_type: str
    layouts: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    bridge: tuple[str, ...] = ()
    why: str = ""


SHOWN: dict[str, Shown] = {
    "gpt2": Shown("gpt2", _DENSE),
    "gpt2_untied": Shown("gpt2", ("TP2",)),
    "llama": Shown("llama", _DENSE, engine=("TP2",)),
    "llama_biased": Shown("llama", ("TP2",)),
    "llama3_tied": Shown("llama", _DENSE),
    "llama_linear": Shown("llama", ("TP1",)),
    "qwen2_yarn": Shown("qwen2", _DENSE),
    "mistral": Shown("mistral", _DENSE),
    "qwen2": Shown("qwen2", _DENSE),
    "qwen3": Shown("qwen3", _DENSE),
    "mixtral": Shown("mixtral", _EXPERTS),
    "qwen2_moe": Shown("qwen2_moe", _EXPERTS),
    "qwen3_moe": Shown("qwen3_moe", _EXPERTS),
    "deepseek_v2": Shown("deepseek_v2", _EXPERTS),
    "deepseek_v2_lite": Shown("deepseek_v2"),  # 0.19 has no latent attention without compressed queries
    "deepseek_v3": Shown("deepseek_v3", _EXPERTS, engine=("EP2",)),
    "glm4_moe": Shown("glm4_moe", _EXPERTS),
    "glm4_moe_air": Shown("glm4_moe", _EXPERTS),
    "seed_oss": Shown("seed_oss", _DENSE),
    "ernie4_5": Shown("ernie4_5", _DENSE),
    "smollm3": Shown("smollm3", _DENSE),
    "starcoder2": Shown("starcoder2", _DENSE),
    "phi3": Shown("phi3", _DENSE),
    "phi4_mini": Shown("phi3", _DENSE),
    "arcee": Shown("arcee", _DENSE),
    "gpt_oss": Shown("gpt_oss", _EXPERTS, engine=("TP2",)),
    "qwen3_next": Shown("qwen3_next", engine=_EXPERTS),
    "qwen3_5": Shown("qwen3_5_text", engine=_DENSE),
    "qwen3_5_moe": Shown("qwen3_5_moe_text", engine=_EXPERTS),
    "deepseek_v32": Shown("deepseek_v32", engine=_INDEXED),
    "glm_moe_dsa": Shown("glm_moe_dsa", engine=_INDEXED),
    "glm4_moe_lite": Shown("glm4_moe_lite", _EXPERTS),
    "internlm3": Shown("internlm3", _DENSE),
    "gemma3": Shown("gemma3_text", bridge=("TP2",)),
    "minimax_m2": Shown("minimax_m2", bridge=("TP2",)),
    "olmoe": Shown("olmoe", bridge=("TP1",)),  # its norms are whole on each rank
    "gemma2": Shown("gemma2", bridge=("TP2",)),
    "gemma": Shown("gemma", engine=("TP2",)),  # as Megatron-Bridge configures it
    "stablelm": Shown("stablelm", ("TP2",)),
    "gpt_bigcode": Shown("gpt_bigcode", ("TP2",)),
    "nemotron": Shown("nemotron", engine=("TP2",)),  # Megatron's own norms do not add one to the weight
    "glm": Shown("glm", ("TP2",)),
    "gpt_neox": Shown("gpt_neox", ("TP2",)),
    "hy_v3": Shown("hy_v3", ("TP2", "EP2")),
    "exaone4": Shown("exaone4", bridge=("TP2",)),
    "exaone_moe": Shown("exaone_moe", ("TP2", "EP2")),
    "dots1": Shown("dots1", ("TP2", "EP2")),
    "ministral3": Shown("ministral3", ("TP2",)),
    "mamba2": Shown("mamba2", engine=_DENSE),
    "nemotron_h": Shown("nemotron_h", engine=_EXPERTS),
}
COMPUTES_AS = {
    "internlm2": "llama", "chatglm": "glm", "qwen": "qwen2", "exaone": "llama", "orion": "stablelm",
    "bailing_moe_v2": "glm4_moe", "sarvam_moe": "glm4_moe",
}  # fmt: skip
"""Types whose class transformers does not have, and the type of an equal model: `tests/huggingface/own_code`."""
OF_OWN_CODE = {"deepseek": "EP2", "nemotron-nas": "TP2"}
"""Types for which transformers has neither a class nor an equal model, and the layout of the comparison."""
BUILT_BY_MEGATRON = [name for name, shown in SHOWN.items() if shown.layouts]
CASES = [("local", name, layout) for name, shown in SHOWN.items() for layout in shown.layouts] + [
    ("transformer_engine", name, layout) for name, shown in SHOWN.items() for layout in shown.engine
]
"""Layer spec, model, layout."""
BUILT_BY_BRIDGE = [name for name, shown in SHOWN.items() if shown.bridge]
WITNESSED = list(dict.fromkeys(name for _, name, _ in CASES))
