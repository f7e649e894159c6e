"""The language model of models that also see or hear: its configuration and the names of its tensors.

In a text without images, the three axes of positions are equal, so `mrope` equals RoPE.
Sources: the classes for conditional generation of transformers 4.49 to 5.23; for types that have none there,
models/nemotron_vl and nemotron_omni of Megatron-Bridge 0.6.2 (Nemotron Nano VL and Omni), llava/model of
haotian-liu/LLaVA (the first LLaVA, whose text has no section), and `Maira2ForConditionalGeneration`, which is LLaVA's
class with another projector.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.family import HuggingFaceTensor

# The family of the language model by the type of the whole model.
TEXT_OF: Mapping[str, str] = {
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "kimi_vl": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "mistral3": "mistral",
    "glm4v_moe": "glm4_moe",
    "llava": "llama",
    "llava_llama": "llama",
    "llava_mistral": "mistral",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "internvl": "qwen2",
    "idefics3": "llama",
    "smolvlm": "llama",
    "maira2": "llama",
    "voxtral": "llama",
    "qwen2_audio": "qwen2",
    "qwen3_asr": "qwen3",
    "qwen2_5_omni": "qwen2",
    "qwen2_5_omni_thinker": "qwen2",
    "qwen3_omni_moe": "qwen3_moe",
    "qwen3_omni_moe_thinker": "qwen3_moe",
    "NemotronH_Nano_VL_V2": "nemotron_h",
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h",
}
# Types with language models of several families, which `text_config` names.
_NAMED_INSIDE: Mapping[str, Collection[str]] = {"mistral3": ("mistral", "ministral3"), "voxtral": ("llama", "mistral")}
# Types whose language model is that of any family, with the configuration class of that family.
_OF_ANY_FAMILY = (
    "llava",
    "llava_llama",
    "llava_mistral",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "internvl",
    "idefics3",
    "smolvlm",
    "maira2",
)
# Types whose model is tied if either part says so (`__post_init__` of their configuration).
_TIED_BY_TEXT = ("llava", "llava_next_video", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "glm4v_moe")
# Types whose model is tied if neither part says that it is not, and the folder has no output layer (`Mistral3Config`,
# `InternVLConfig`, `KimiK25Config`, `Qwen3ASRConfig` and `tie_weights` of modeling_utils.py, 5.23).
_TIED_BY_DEFAULT = ("mistral3", "internvl", "kimi_k25", "qwen3_asr")
# Keys about images in a LLaVA without `text_config`.
_IMAGES_OF_LLAVA = re.compile(
    r"(((un)?freeze|tune)_)?mm_|image_|use_mm_proj$|tokenizer_(padding_side|model_max_length)$"
)
# Keys of the part that understands, in a model that also speaks, and of the language model.
_THINKER = "thinker_config"
_TEXT = ("text_config", "llm_config")
# Values that a class uses regardless of its `config.json`.
_ALWAYS: Mapping[str, Mapping[str, Any]] = {"qwen3_vl_moe": {"norm_topk_prob": True}}
# Defaults of the class of the text that differ from those of the family's own class: `Qwen2VLTextConfig` and
# `Qwen2_5_VLTextConfig`, `Qwen3VLTextConfig` and `Qwen3VLMoeTextConfig`, `Glm4vMoeTextConfig`, `Qwen2_5OmniTextConfig`,
# and `Qwen3OmniMoeTextConfig` (5.23).
_BASE = "rope_theta"
_QWEN2_VL: Mapping[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "rms_norm_eps": 1e-5,
    _BASE: 1e6,
}
_QWEN2_5_OMNI: Mapping[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    _BASE: 1e6,
}
_QWEN3_OMNI: Mapping[str, Any] = {
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "vocab_size": 3584,
    "norm_topk_prob": True,
    _BASE: 1e6,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen3_vl": {"max_position_embeddings": 128000},
    "qwen3_vl_moe": {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "max_position_embeddings": 128000,
    },
    "glm4v_moe": {"attention_bias": True, "vocab_size": 151424, "max_position_embeddings": 65536},
    "qwen2_5_omni": _QWEN2_5_OMNI,
    "qwen2_5_omni_thinker": _QWEN2_5_OMNI,
    "qwen3_omni_moe": _QWEN3_OMNI,
    "qwen3_omni_moe_thinker": _QWEN3_OMNI,
}
# Types whose class has another default for the base of RoPE in each release: 5,000,000 in 4.57 and 500,000 in 5.23.
_WITHOUT_BASE = ("qwen3_vl", "qwen3_vl_moe")
_OF_IMAGES = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
    "image_token_index",
    "boi_token_index",
    "eoi_token_index",
    "mm_tokens_per_image",
    "media_placeholder_token_id",
    "ignore_index",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_feature_layer",
)
TIED = "tie_word_embeddings"
_OF_THE_FILE = ("quantization_config", "torch_dtype", "dtype")
_ROPE = ("rope_scaling", "rope_parameters")
_AXES = ("mrope_section", "mrope_interleaved")
_NAMES = (
    (re.compile(r"^(model\.language_model\.|model\.text_model\.|language_model\.model\.|thinker\.model\.)"), "model."),
    (re.compile(r"^(language_model|thinker)\.lm_head\."), "lm_head."),
    (re.compile(r"^language_model\.backbone\."), "backbone."),
)
_OTHERS = re.compile(
    r"^(model\.|thinker\.)?(visual|vision_tower|vision_model|audio_tower|multi_modal_projector|mm_projector|connector)\."
    r"|^(model\.)?image_newline$"
    r"|^(talker|token2wav|code2wav|mlp1|sound_encoder|sound_projection)\."
)


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the `config.json` of the language model in its family's form.

    Returns:
        None if it is no part of a larger model.
    """
    whole_kind = str(config.get("model_type"))
    inside = text_section(config)
    if whole_kind == "ministral3" and isinstance(inside, Mapping):  # the first release of Ministral 3
        whole_kind = "mistral3"
    kind = TEXT_OF.get(whole_kind)
    if kind is None:
        return None
    named = kind if inside is None else str(inside.get("model_type", kind))
    if whole_kind in _OF_ANY_FAMILY or named in _NAMED_INSIDE.get(whole_kind, ()):
        kind = named
    owner = _owner_of_text(config)
    whole = {key: config[key] for key in _OF_THE_FILE if key in config}
    if TIED in owner:  # the model around the text ties its embeddings
        is_tied_by_text = whole_kind in _TIED_BY_TEXT and bool((inside or {}).get(TIED))
        whole[TIED] = owner[TIED] or is_tied_by_text
    language = _language_config(config) if inside is None else inside
    text = {**_class_defaults(whole_kind, language), **language, **whole}
    for key in (*_OF_IMAGES, *_TEXT):
        text.pop(key, None)
    for key in _ROPE:
        if isinstance(text.get(key), Mapping):
            text[key] = _one_axis_scaling(text[key])
    always = _ALWAYS.get(str(config["model_type"]), {})
    return {**text, **always, "model_type": kind, "architectures": None}


def _class_defaults(kind: str, language: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a text lacks and for which its class has another default than the family's.

    Raises:
        UnsupportedCheckpointError: the default depends on the release of transformers.
    """
    defaults = dict(_DEFAULTS.get(kind, {}))
    parts = (language, *(language[key] for key in _ROPE if isinstance(language.get(key), Mapping)))
    if any(_BASE in part for part in parts):
        defaults.pop(_BASE, None)
    elif kind in _WITHOUT_BASE:
        raise UnsupportedCheckpointError(
            "config.json lacks a key whose default differs between releases of transformers",
            found=f"no {_BASE}, which means 5,000,000 to {kind} in 4.57 and 500,000 in 5.23",
            expected=_BASE,
            where="config.json",
            hint="set the value used in training",
        )
    return defaults


def tied_by_default(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` leaves it to the folder's tensors whether the embeddings are tied."""
    return config.get("model_type") in _TIED_BY_DEFAULT and TIED not in config


def class_of_text(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Return the `model_type` whose configuration class the language model has.

    Args:
        config: the `config.json`.
        text: that of the language model, as `text_config` returns it.
    """
    kind = str(config.get("model_type"))
    return str(text["model_type"]) if kind in _OF_ANY_FAMILY else kind


def _language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` with all keys on one level without those about images."""
    return {key: value for key, value in config.items() if not _IMAGES_OF_LLAVA.match(key)}


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the part of a `config.json` about the language model; None if it has none."""
    parts = (_owner_of_text(config).get(key) for key in _TEXT)
    return next((part for part in parts if isinstance(part, Mapping)), None)


def _owner_of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a `config.json` that contains that of the language model."""
    thinker = config.get(_THINKER)
    return thinker if isinstance(thinker, Mapping) else config


def _one_axis_scaling(scaling: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a scaling without its keys for images; None if it only had these."""
    kept = {key: value for key, value in scaling.items() if key not in _AXES}
    kept = {key: "default" if value == "mrope" else value for key, value in kept.items()}
    return None if kept.keys() <= {"type", "rope_type"} and {*kept.values()} == {"default"} else kept


def turned_experts(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a stack of experts if a folder stores it transposed (Qwen3-VL); otherwise None.

    As in transformers (`Transpose` with `check_dims`, conversion_mapping.py, 5.23), a matching shape is not changed.
    """
    hidden = config.get("hidden_size")
    width = config.get("moe_intermediate_size")
    gate_and_up, down = (name.endswith(f".mlp.experts.{projection}_proj") for projection in ("gate_up", "down"))
    if not (gate_and_up or down) or type(hidden) is not int or type(width) is not int or len(shape) != 3:
        return None
    expected = (2 * width, hidden) if gate_and_up else (hidden, width)
    return (shape[0], *expected) if shape[1:] != expected and shape[1:] == expected[::-1] else None


def turned_stack(tensor: HuggingFaceTensor) -> HuggingFaceTensor:
    """Return a stack of experts with transposed matrices, as published folders have; others unchanged.

    Raises:
        UnsupportedCheckpointError: a matrix is square, so that its orientation cannot be recognized.
    """
    count, rows, columns = tensor.shape if len(tensor.shape) == 3 else (0, 0, 1)
    if not count:
        return tensor
    if rows == columns:
        raise UnsupportedCheckpointError(
            "the orientation of expert matrices can only be recognized by their shape",
            found=f"{rows} x {columns}",
            expected="matrices that are no squares",
            where=tensor.name,
            hint="only a model whose expert width differs from its hidden size can be converted",
        )
    return replace(tensor, shape=(count, columns, rows), transposed=True)


def text_names(names: Iterable[str]) -> dict[str, str | None]:
    """Return the names of tensors in a folder of the language model only.

    Returns:
        The name in such a folder by given name; None for tensors of other parts, such as a vision tower.
    """
    text_by_name: dict[str, str | None] = {}
    for name in names:
        text = name
        for pattern, ours in _NAMES:
            text = pattern.sub(ours, text)
        text_by_name[name] = None if _OTHERS.match(name) else text
    return text_by_name
