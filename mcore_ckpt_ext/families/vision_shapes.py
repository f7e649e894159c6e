"""The names and shapes of vision towers in Hugging Face's folders, from `config.json` alone.

Sources: the vision classes of transformers 4.49 to 5.23 (models/qwen2_5_vl, qwen3_vl, siglip, gemma3, clip, llava).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]

_PARTS = 3  # queries, keys, values
# How releases spell the prefixes of the same tensors.
_SPELLINGS = (
    (re.compile(r"^model\.(?=visual\.|vision_tower\.|multi_modal_projector\.)"), ""),
    (re.compile(r"^vision_tower\.vision_model\."), "vision_tower."),
)
# Values of the configuration classes for keys that a published `config.json` may leave out.
_QWEN2_5 = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
_QWEN3 = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 2304,
}
_SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
}
_CLIP = {**_SIGLIP, "patch_size": 32}


def strip_prefix(name: str) -> str:
    """Return a stored name as `vision_shapes` spells it."""
    for pattern, written in _SPELLINGS:
        name = pattern.sub(written, name)
    return name


def vision_shapes(config: Mapping[str, Any]) -> Shapes | None:
    """Return the shape of each tensor of a model's vision part and projector, by name.

    Args:
        config: the `config.json` of the whole model.

    Returns:
        None if this package does not know the tower, or the configuration does not determine it.
    """
    vision = config.get("vision_config")
    tower = _TOWERS.get(str(config.get("model_type")))
    if tower is None or not isinstance(vision, Mapping):
        return None
    defaults, shapes_of = tower
    sizes = {key: vision.get(key, default) for key, default in defaults.items()}
    sizes["in_channels"] = vision.get("in_chans", sizes.get("in_channels", 3))
    if not all(type(size) is int and size > 0 for size in sizes.values()):
        return None
    return shapes_of(sizes, vision, config)


def _linear(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _patches(name: str, sizes: Mapping[str, int]) -> Shapes:
    """Return the shape of a projection of patches over several images."""
    side = sizes["patch_size"]
    width = sizes["hidden_size"]
    return {f"{name}.weight": (width, sizes["in_channels"], sizes["temporal_patch_size"], side, side)}


def _qwen2_5(sizes: Mapping[str, int], vision: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes:
    width = sizes["hidden_size"]
    wide = sizes["intermediate_size"]
    shapes = _patches("visual.patch_embed.proj", sizes)
    for number in range(sizes["depth"]):
        block = f"visual.blocks.{number}"
        shapes |= {f"{block}.norm1.weight": (width,), f"{block}.norm2.weight": (width,)}
        shapes |= _linear(f"{block}.attn.qkv", _PARTS * width, width) | _linear(f"{block}.attn.proj", width, width)
        for projection in ("gate", "up"):
            shapes |= _linear(f"{block}.mlp.{projection}_proj", wide, width)
        shapes |= _linear(f"{block}.mlp.down_proj", width, wide)
    merged = width * sizes["spatial_merge_size"] ** 2
    shapes |= {"visual.merger.ln_q.weight": (width,)} | _linear("visual.merger.mlp.0", merged, merged)
    return shapes | _linear("visual.merger.mlp.2", sizes["out_hidden_size"], merged)


def _qwen3(sizes: Mapping[str, int], vision: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes | None:
    after = vision.get("deepstack_visual_indexes", [8, 16, 24])
    if not isinstance(after, list):
        return None
    width = sizes["hidden_size"]
    wide = sizes["intermediate_size"]
    shapes = _patches("visual.patch_embed.proj", sizes) | {"visual.patch_embed.proj.bias": (width,)}
    shapes |= {"visual.pos_embed.weight": (sizes["num_position_embeddings"], width)}
    for number in range(sizes["depth"]):
        block = f"visual.blocks.{number}"
        shapes |= _norm(f"{block}.norm1", width) | _norm(f"{block}.norm2", width)
        shapes |= _linear(f"{block}.attn.qkv", _PARTS * width, width) | _linear(f"{block}.attn.proj", width, width)
        shapes |= _linear(f"{block}.mlp.linear_fc1", wide, width) | _linear(f"{block}.mlp.linear_fc2", width, wide)
    merged = width * sizes["spatial_merge_size"] ** 2
    mergers = {"visual.merger": width}
    mergers |= {f"visual.deepstack_merger_list.{number}": merged for number in range(len(after))}
    for name, normalized in mergers.items():
        shapes |= _norm(f"{name}.norm", normalized) | _linear(f"{name}.linear_fc1", merged, merged)
        shapes |= _linear(f"{name}.linear_fc2", sizes["out_hidden_size"], merged)
    return shapes


def _encoder(sizes: Mapping[str, int], extra_positions: int) -> Shapes:
    """Return the shapes that CLIP and SigLIP share."""
    width = sizes["hidden_size"]
    wide = sizes["intermediate_size"]
    side = sizes["patch_size"]
    positions = (sizes["image_size"] // side) ** 2 + extra_positions
    shapes: Shapes = {
        "vision_tower.embeddings.patch_embedding.weight": (width, sizes["num_channels"], side, side),
        "vision_tower.embeddings.position_embedding.weight": (positions, width),
    }
    for number in range(sizes["num_hidden_layers"]):
        layer = f"vision_tower.encoder.layers.{number}"
        for projection in ("q", "k", "v", "out"):
            shapes |= _linear(f"{layer}.self_attn.{projection}_proj", width, width)
        shapes |= _norm(f"{layer}.layer_norm1", width) | _norm(f"{layer}.layer_norm2", width)
        shapes |= _linear(f"{layer}.mlp.fc1", wide, width) | _linear(f"{layer}.mlp.fc2", width, wide)
    return shapes | _norm("vision_tower.post_layernorm", width)


def _text_width(config: Mapping[str, Any], default: int) -> int | None:
    text = config.get("text_config")
    width = text.get("hidden_size", default) if isinstance(text, Mapping) else default
    return width if type(width) is int else None


def _gemma3(sizes: Mapping[str, int], vision: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes | None:
    width = sizes["hidden_size"]
    text = _text_width(config, 2304)
    if text is None or vision.get("model_type", "siglip_vision_model") != "siglip_vision_model":
        return None
    shapes = _encoder(sizes, 0) | {"vision_tower.embeddings.patch_embedding.bias": (width,)}
    shapes |= {"multi_modal_projector.mm_soft_emb_norm.weight": (width,)}
    return shapes | {"multi_modal_projector.mm_input_projection_weight": (width, text)}


def _llava(sizes: Mapping[str, int], vision: Mapping[str, Any], config: Mapping[str, Any]) -> Shapes | None:
    text = _text_width(config, 4096)
    layers = config.get("vision_feature_layer", -2)
    if text is None or vision.get("model_type") != "clip_vision_model":
        return None
    width = sizes["hidden_size"]
    joined = width * (len(layers) if isinstance(layers, list) else 1)
    shapes = _encoder(sizes, 1) | {"vision_tower.embeddings.class_embedding": (width,)}
    shapes |= _norm("vision_tower.pre_layrnorm", width)  # so spelled in transformers
    shapes |= _linear("multi_modal_projector.linear_1", text, joined)
    shapes |= _linear("multi_modal_projector.linear_2", text, text)
    if not config.get("multimodal_projector_bias", True):
        shapes = {name: shape for name, shape in shapes.items() if not re.match(r"multi_modal_projector.*bias$", name)}
    return shapes


_TOWERS: Mapping[
    str, tuple[Mapping[str, int], Callable[[Mapping[str, int], Mapping[str, Any], Mapping[str, Any]], Shapes | None]]
] = {
    "qwen2_5_vl": (_QWEN2_5, _qwen2_5),
    "qwen3_vl": (_QWEN3, _qwen3),
    "qwen3_vl_moe": (_QWEN3, _qwen3),
    "gemma3": (_SIGLIP, _gemma3),
    "llava": (_CLIP, _llava),
}
