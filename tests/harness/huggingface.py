"""Tiny models of every family, made by transformers from a configuration, with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging

from mcore_ckpt_ext import TorchDist

logging.set_verbosity_error()
logging.disable_progress_bar()

VOCABULARY, POSITIONS = 250, 128
# Families with one mistake each, for `--family`.
MISTAKES = Path(__file__).with_name("mistakes.py")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": POSITIONS,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    **_SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_MIXTURE: dict[str, Any] = {**_SIZES, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
_NET: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip
_INDEXER: dict[str, Any] = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}
_LLAMA_3_ROPE = {
    "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_YARN = {
    "rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 4096,
}  # fmt: skip


def _configured(class_name: str, **keys: Any) -> Callable[[], PretrainedConfig]:
    return lambda: getattr(transformers, class_name)(**keys)


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": _configured("GPT2Config", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS),
    "gpt2_untied": _configured(
        "GPT2Config", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS,
        tie_word_embeddings=False,
    ),
    "llama": _configured("LlamaConfig", **_SIZES),
    "llama_biased": _configured("LlamaConfig", **_SIZES, attention_bias=True, mlp_bias=True),
    "llama3_tied": _configured(
        "LlamaConfig", **_SIZES, rope_parameters=_LLAMA_3_ROPE, tie_word_embeddings=True, head_dim=16
    ),
    "llama_linear": _configured(
        "LlamaConfig", **_SIZES, rope_parameters={"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}
    ),
    "qwen2_yarn": _configured(
        "Qwen2Config", **_SIZES,
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "yarn", "factor": 4.0,
                         "original_max_position_embeddings": 32},
    ),
    "mistral": _configured("MistralConfig", **_SIZES, sliding_window=16),
    "qwen2": _configured("Qwen2Config", **_SIZES, tie_word_embeddings=True),
    "qwen3": _configured("Qwen3Config", **_SIZES, head_dim=16),
    "mixtral": _configured("MixtralConfig", **_SIZES, num_local_experts=4),
    "qwen2_moe": _configured(
        "Qwen2MoeConfig", **_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[0],
    ),
    "qwen3_moe": _configured(
        "Qwen3MoeConfig", **_SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "deepseek_v2": _configured(
        "DeepseekV2Config",
        **{**_LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
        routed_scaling_factor=1.5,
    ),
    "deepseek_v2_lite": _configured("DeepseekV2Config", **{**_LATENT, "q_lora_rank": None}),
    "deepseek_v3": _configured(
        "DeepseekV3Config",
        **{**_LATENT, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
        rope_parameters=_YARN,
    ),
    "glm4_moe": _configured(
        "Glm4MoeConfig", **{**_MIXTURE, "n_shared_experts": 1}, head_dim=8, n_routed_experts=4,
        attention_bias=True, use_qk_norm=True, first_k_dense_replace=1, routed_scaling_factor=2.5,
    ),
    "glm4_moe_air": _configured(
        "Glm4MoeConfig", **_MIXTURE, n_shared_experts=2, head_dim=16, n_routed_experts=4, attention_bias=True
    ),
    "seed_oss": _configured("SeedOssConfig", **_SIZES, head_dim=16, residual_dropout=0.2),
    "ernie4_5": _configured("Ernie4_5Config", **_SIZES, head_dim=16),
    "smollm3": _configured("SmolLM3Config", **_SIZES, no_rope_layers=[1, 0], pad_token_id=0),
    "starcoder2": _configured("Starcoder2Config", **_SIZES, sliding_window=16),
    "phi3": _configured("Phi3Config", **_SIZES, sliding_window=16, pad_token_id=0),
    "phi4_mini": _configured(
        "Phi3Config", **{**_SIZES, "hidden_size": 64}, tie_word_embeddings=True, pad_token_id=0,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.75},
    ),
    "arcee": _configured("ArceeConfig", **_SIZES),
    "minimax_m2": _configured(
        "MiniMaxM2Config", **_SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        rope_theta=5000000.0, rotary_dim=8,
    ),
    "olmoe": _configured("OlmoeConfig", **{**_SIZES, "num_key_value_heads": 4}, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": _configured(
        "GptOssConfig", **_SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
    ),
    "qwen3_next": _configured(
        "Qwen3NextConfig", **{**_MIXTURE, "num_hidden_layers": 4}, head_dim=16, num_experts=4, **_NET,
        shared_expert_intermediate_size=24,
    ),
    "qwen3_5": _configured("Qwen3_5TextConfig", **{**_SIZES, "num_hidden_layers": 4}, head_dim=16, **_NET),
    "qwen3_5_moe": _configured(
        "Qwen3_5MoeTextConfig", **{**_MIXTURE, "num_hidden_layers": 4}, head_dim=16, num_experts=4, **_NET,
        shared_expert_intermediate_size=24,
    ),
    "deepseek_v32": _configured("DeepseekV32Config", **_LATENT, **_INDEXER),
    "glm_moe_dsa": _configured(
        "GlmMoeDsaConfig", **{**_LATENT, "num_hidden_layers": 4}, **_INDEXER, routed_scaling_factor=1.5,
        indexer_types=["full", "full", "shared", "full"],
    ),
    "glm4_moe_lite": _configured(
        "Glm4MoeLiteConfig",
        **{key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"}, routed_scaling_factor=1.5,
    ),
    "internlm3": _configured("InternLM3Config", **_SIZES, head_dim=16),
    "gemma3": _configured(
        "Gemma3TextConfig", **{**_SIZES, "num_hidden_layers": 6}, head_dim=8, sliding_window=16,
        query_pre_attn_scalar=24,
    ),
    "mamba2": _configured(
        "Mamba2Config", hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=2,
        chunk_size=8, vocab_size=VOCABULARY, tie_word_embeddings=False,
    ),
    "nemotron_h": _configured(
        "NemotronHConfig", **{key: value for key, value in _SIZES.items() if key != "num_hidden_layers"}, head_dim=8,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
        mamba_num_heads=8, mamba_head_dim=8, n_groups=2, ssm_state_size=4, chunk_size=8, n_routed_experts=4,
        moe_intermediate_size=16, moe_shared_expert_intermediate_size=24,
    ),
    "gemma2": _configured("Gemma2Config", **_SIZES, head_dim=8, sliding_window=16, query_pre_attn_scalar=24),
    "gemma": _configured("GemmaConfig", **_SIZES, head_dim=16),
    "stablelm": _configured("StableLmConfig", **{**_SIZES, "hidden_size": 64}, use_qkv_bias=True),
    "gpt_bigcode": _configured(
        "GPTBigCodeConfig", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS
    ),
    "nemotron": _configured("NemotronConfig", **_SIZES, head_dim=16),
    "glm": _configured("GlmConfig", **_SIZES, head_dim=16, pad_token_id=0),
    "gpt_neox": _configured(
        "GPTNeoXConfig", **{key: size for key, size in _SIZES.items() if key != "num_key_value_heads"},
        use_parallel_residual=False,
    ),
    "hy_v3": _configured("HYV3Config", **_MIXTURE, head_dim=16, num_experts=4, num_shared_experts=2),
    "dots1": _configured(
        "Dots1Config", **{**_MIXTURE, "n_shared_experts": 2, "n_routed_experts": 4}, first_k_dense_replace=1,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_group=1, topk_group=1,
    ),
    "exaone4": _configured(
        "Exaone4Config", **_SIZES, head_dim=16, sliding_window=None, rope_parameters=_LLAMA_3_ROPE,
        tie_word_embeddings=True, layer_types=["full_attention"] * 2,
    ),
    "exaone_moe": _configured(
        "ExaoneMoeConfig", **{**_MIXTURE, "num_hidden_layers": 4}, num_experts=4, sliding_window=16,
    ),
    "ministral3": _configured(
        "Ministral3Config", **_SIZES, head_dim=16,
        rope_parameters={**_YARN, "mscale_all_dim": 0.0, "original_max_position_embeddings": 32,
                         "llama_4_scaling_beta": 0.0},
    ),
}  # fmt: skip

_VERSIONS = {"deepseek_v2_lite": "0.18.0"}


def make(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Make a model, save it, and return it.

    Weights are large enough for every part to matter: with transformers' initialization, attention is nearly uniform.
    """
    torch.manual_seed(sum(name.encode()))
    config = CONFIGS[name]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for label, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in label or "ln_" in label:
                tensor.copy_(0.3 * torch.randn_like(tensor) + (name not in ("gemma", "gemma2", "gemma3", "nemotron")))
            elif "inv_freq" not in label and tensor.is_floating_point():
                tensor.copy_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return model


def add_further_layer(folder: Path) -> None:
    """Add an MTP layer as in released folders, numbered after those of the decoder."""
    stored = tensors(folder)
    last = max(int(name.split(".")[2]) for name in stored if name.startswith("model.layers."))
    theirs = f"model.layers.{last + 1}"
    hidden = stored["model.embed_tokens.weight"].shape[1]
    generator = torch.Generator().manual_seed(last)
    layer = {
        name.replace(f"layers.{last}.", f"layers.{last + 1}."): torch.randn(tensor.shape, generator=generator)
        for name, tensor in stored.items() if f"layers.{last}." in name
    }  # fmt: skip
    norms = {f"{theirs}.{name}.weight": torch.randn(hidden, generator=generator)
             for name in ("enorm", "hnorm", "shared_head.norm")}  # fmt: skip
    copies = {
        f"{theirs}.embed_tokens.weight": stored["model.embed_tokens.weight"].clone(),
        f"{theirs}.shared_head.head.weight": stored["lm_head.weight"].clone(),
    }
    projection = {f"{theirs}.eh_proj.weight": torch.randn(hidden, 2 * hidden, generator=generator)}
    save_file({**stored, **layer, **norms, **copies, **projection}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


def make_all(root: Path) -> None:
    """Make a folder of every model below `root`, in fp32."""
    for name in CONFIGS:
        make(name, root / name)


def torch_dist(name: str, transformer_impl: Any = None) -> TorchDist:
    """Return the target options for a model, for the newest Megatron that supports it."""
    return TorchDist(transformer_impl=transformer_impl, megatron_version=_VERSIONS.get(name))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a Hugging Face folder."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def dequantized_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize fp8 weights in blocks with transformers, whose module takes seconds to import."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)


def dequantized_experts(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize 4-bit experts with transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales)


def assert_same_tensors(one: Path, other: Path) -> None:
    """Check that two Hugging Face folders contain the same tensors, bit for bit."""
    expected, found = tensors(one), tensors(other)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
}
_DEEP = {
    **_VISION, "depth": 2, "intermediate_size": 48, "num_position_embeddings": 16, "patch_size": 4,
    "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
_AXES = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [1, 1, 2]}
# Class, text part, and vision part.
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", {**_SIZES, "rope_parameters": _AXES}, {**_VISION, "fullatt_block_indexes": [0]}),
    "qwen3_vl": (
        "Qwen3VL", {**_SIZES, "head_dim": 8, "rope_parameters": {**_AXES, "mrope_interleaved": True}}, _DEEP,
    ),
    "qwen3_5": ("Qwen3_5", {**_SIZES, "num_hidden_layers": 4, "head_dim": 16, **_NET}, _VISION),
    "gemma3": (
        "Gemma3", {**_SIZES, "num_hidden_layers": 6, "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 24},
        _SIGLIP,
    ),
    "kimi_k25": (
        "Kimi_K25", {**_LATENT, "model_type": "deepseek_v3", "tie_word_embeddings": False},
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    "mistral3": (
        "Mistral3", {**_SIZES, "model_type": "mistral", "head_dim": 16},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
         "image_size": 56, "patch_size": 14},
    ),
}  # fmt: skip
_EXPERTS_OF_TEXT = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
WHOLE_WITH_EXPERTS = {
    "qwen3_vl_moe": ("Qwen3VLMoe", {**WHOLE["qwen3_vl"][1], **_EXPERTS_OF_TEXT}, WHOLE["qwen3_vl"][2])
}
# As released: heads of 128, and the number of their frequencies for each axis.
_RELEASED = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
_RELEASED_AXES = {"qwen2_5_vl": [16, 24, 24], "qwen3_vl": [24, 20, 20], "qwen3_vl_moe": [24, 20, 20]}


def save_whole(name: str, folder: Path, **released: Any) -> Any:
    """Make a vision-language model, save it, and return it.

    `released`: changes of its text, which then has the heads of released models, with all tensors in bfloat16.
    """
    kind, text, vision = (WHOLE | WHOLE_WITH_EXPERTS)[name]
    if released:
        text = {**text, **_RELEASED, **released}
        vision = {**vision, **({"out_hidden_size": _RELEASED["hidden_size"]} if "out_hidden_size" in vision else {})}
        if name in _RELEASED_AXES:
            text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": _RELEASED_AXES[name]}
    torch.manual_seed(7)
    untied = {"tie_word_embeddings": False}
    further = {"gemma3": {"mm_tokens_per_image": 4}, "kimi_k25": untied, "mistral3": untied}.get(name, {})
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **further)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(config).eval()
    model = model.to(torch.bfloat16 if released else torch.float32)
    with torch.no_grad():
        for label, tensor in model.named_parameters():
            tensor.copy_(0.3 * torch.randn_like(tensor) + ("norm" in label and name != "gemma3"))
            if "linear_attn.norm" in label:
                tensor.copy_((tensor.abs() + 0.5).clamp(max=2))  # minus 1 without rounding
    # transformers 5.23 names Kimi-K2.5's text layers `blocks`, like the released vision layers.
    model.save_pretrained(folder, save_original_format=name != "kimi_k25")
    return model


def assert_same_whole(name: str, source: Path, back: Path) -> None:
    """Check that a converted folder has the tensors of released folders, and otherwise those of transformers."""
    expected, found = tensors(source), tensors(back)
    if name == "gemma3":
        expected = {
            label.replace("vision_tower.", "vision_tower.vision_model."): one for label, one in expected.items()
        }
    assert found.keys() == expected.keys()
    for label, tensor in expected.items():
        turned = name == "qwen3_vl_moe" and ".mlp.experts." in label
        assert torch.equal(found[label], tensor.transpose(1, 2) if turned else tensor), label
