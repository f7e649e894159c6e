"""Tiny models that hear, or see, around a text that a family has; made by transformers, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.harness.huggingface import POSITIONS, VOCABULARY

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": POSITIONS,
}  # fmt: skip
_AXES = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 1, 1]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_ENCODER = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 16,
}  # fmt: skip
_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "image_size": 16,
}  # fmt: skip
_CLIP = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "projection_dim": 16, "vocab_size": VOCABULARY,
}  # fmt: skip
ALSO_HEARING: dict[str, tuple[str, dict[str, Any]]] = {
    "voxtral": ("Voxtral", {
        "text_config": {**_TEXT, "model_type": "llama", "head_dim": 16},
        "audio_config": {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1,
                         "num_attention_heads": 2, "num_mel_bins": 16, "max_source_positions": 20},
    }),
    "qwen2_audio": ("Qwen2Audio", {
        "text_config": {**_TEXT, "model_type": "qwen2"}, "audio_config": {**_ENCODER, "max_source_positions": 20},
    }),
    "qwen3_asr": ("Qwen3ASR", {
        "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
        "audio_config": {**_ENCODER, "output_dim": 32, "downsample_hidden_size": 8},
    }),
    "glm4v_moe": ("Glm4vMoe", {
        "text_config": {**_TEXT, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_routed_experts": 4,
                        "head_dim": 16, "rope_parameters": {**_AXES, "partial_rotary_factor": 0.5}},
        "vision_config": _VISION,
    }),
    "qwen2_5_omni_thinker": ("Qwen2_5OmniThinker", {
        "text_config": {**_TEXT, "rope_parameters": _AXES}, "vision_config": _VISION,
        "audio_config": {**_ENCODER, "max_source_positions": 20, "output_dim": 32},
    }),
    "qwen3_omni_moe_thinker": ("Qwen3OmniMoeThinker", {
        "text_config": {**_TEXT, **_EXPERTS, "head_dim": 8, "rope_parameters": _AXES},
        "vision_config": {**_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        "audio_config": {**_ENCODER, "max_source_positions": 20, "output_dim": 32, "downsample_hidden_size": 8},
    }),
    "llava": ("Llava", {
        "text_config": {**_TEXT, "model_type": "llama", "tie_word_embeddings": True},
        "vision_config": {**_CLIP, "model_type": "clip_vision_model"},
    }),
    "llava_next": ("LlavaNext", {
        "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": 8},
        "vision_config": {**_CLIP, "model_type": "clip_vision_model"},
    }),
    "llava_onevision": ("LlavaOnevision", {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_CLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
    }),
    "llava_next_video": ("LlavaNextVideo", {
        "text_config": {**_TEXT, "model_type": "llama", "tie_word_embeddings": True},
        "vision_config": {**_CLIP, "model_type": "clip_vision_model"},
    }),
    "internvl": ("InternVL", {
        "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 16}, "tie_word_embeddings": False,
        "vision_config": {**_CLIP, "image_size": [16, 16], "patch_size": [4, 4], "model_type": "internvl_vision"},
    }),
    "idefics3": ("Idefics3", {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _CLIP}),
    "smolvlm": ("SmolVLM", {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _CLIP}),
}  # fmt: skip
"""The class of each model type, and its parts."""


def save_hearing(name: str, folder: Path) -> Any:
    """Make a model in fp32, save it, and return it."""
    kind, configured = ALSO_HEARING[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**configured)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(config).eval().float()
    with torch.no_grad():
        for label, tensor in model.named_parameters():
            tensor.copy_(0.3 * torch.randn_like(tensor) + ("norm" in label))
        for label, tensor in model.named_buffers():
            if label.endswith("e_score_correction_bias"):
                tensor.copy_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return model
