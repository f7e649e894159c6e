"""The vision towers of models that Megatron-Bridge builds.

Sources, Megatron-Bridge 0.6.2: models/qwen_vl/qwen25_vl_bridge.py, qwen25_vl_provider.py and modeling_qwen25_vl.py (the
transformers class, replicated on every tensor-parallel rank); qwen3_vl_bridge.py, qwen3_vl_provider.py and
modelling_qwen3_vl (layers of Megatron Core, and mergers); models/gemma_vl/gemma3_vl_bridge.py, gemma3_vl_provider.py
and modeling_gemma3_vl.py (the transformers class, and a projector).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mcore_ckpt_ext.errors import quantity
from mcore_ckpt_ext.families.validation import check_plain
from mcore_ckpt_ext.families.vision import PREFIX, VisionMapping, VisionTower
from mcore_ckpt_ext.model_space.names import is_of_experts


def _same(names: Sequence[str]) -> tuple[VisionMapping, ...]:
    return tuple(VisionMapping(name, name) for name in names)


def _leaves(*modules: str) -> tuple[str, ...]:
    return tuple(f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias"))


def _both(theirs: str, ours: str, by_heads: bool = False) -> tuple[VisionMapping, ...]:
    """Return the rules for a weight and its bias; `ours` is the prefix of the names in Megatron."""
    return tuple(VisionMapping(f"{theirs}.{leaf}", f"{ours}{leaf}", by_heads) for leaf in ("weight", "bias"))


_IN_NETS = ".in_proj."  # gated delta nets: Qwen3.5, which has Qwen3-VL's vision tower
_QWEN_FIELDS = {
    key: key
    for key in (
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    )
}
_QWEN_VISUAL = r"^(model\.)?visual\."

_BLOCK = "visual.blocks.*"
_IN_BLOCK = ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_QWEN2_5 = VisionTower(
    rules=_same(
        (
            "visual.patch_embed.proj.weight",
            f"{_BLOCK}.norm1.weight",
            f"{_BLOCK}.norm2.weight",
            *_leaves(*(f"{_BLOCK}.{one}" for one in _IN_BLOCK)),
            "visual.merger.ln_q.weight",
            *_leaves("visual.merger.mlp.0", "visual.merger.mlp.2"),
        )
    ),
    spellings=((_QWEN_VISUAL, "visual."),),
    text="model.",
    provider="qwen_vl.qwen25_vl_provider.Qwen25VLModelProvider",
    config_class="qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig",
    fields={**_QWEN_FIELDS, "vision_token_id": "vision_token_id"},
    sizes={
        "depth": (r"visual\.blocks\.\d+\.", None),
        "hidden_size": (r"visual\.patch_embed\.proj\.weight$", 0),
        "intermediate_size": (r"visual\.blocks\.\d+\.mlp\.gate_proj\.weight$", 0),
        "out_hidden_size": (r"visual\.merger\.mlp\.2\.weight$", 0),
    },
)


def _deepstack(vision: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Check the blocks whose output goes to mergers."""
    depth = vision["depth"]
    after = vision["deepstack_visual_indexes"]
    if any(type(at) is not int or not 0 <= at < depth for at in after):
        yield f"deepstack_visual_indexes is {after}, and it has {quantity(depth, 'block')}"


_THEIRS = "model.visual.blocks.*"
_OURS = "vision_model.decoder.layers.*"
_MERGERS = "deepstack_merger_list.*"
_QWEN3 = VisionTower(
    rules=(
        *_both("model.visual.patch_embed.proj", "vision_model.patch_embed.proj."),
        VisionMapping("model.visual.pos_embed.weight", "vision_model.pos_embed.weight"),
        *_both(f"{_THEIRS}.norm1", f"{_OURS}.self_attention.linear_qkv.layer_norm_"),
        *_both(f"{_THEIRS}.attn.qkv", f"{_OURS}.self_attention.linear_qkv.", by_heads=True),
        *_both(f"{_THEIRS}.attn.proj", f"{_OURS}.self_attention.linear_proj."),
        *_both(f"{_THEIRS}.norm2", f"{_OURS}.mlp.linear_fc1.layer_norm_"),
        *_both(f"{_THEIRS}.mlp.linear_fc1", f"{_OURS}.mlp.linear_fc1."),
        *_both(f"{_THEIRS}.mlp.linear_fc2", f"{_OURS}.mlp.linear_fc2."),
        *(
            rule
            for theirs, ours in (("merger", "merger"), (_MERGERS, f"decoder.{_MERGERS}"))
            for there, here in (("norm", "patch_norm"), ("linear_fc1",) * 2, ("linear_fc2",) * 2)
            for rule in _both(f"model.visual.{theirs}.{there}", f"vision_model.{ours}.{here}.")
        ),
    ),
    spellings=((_QWEN_VISUAL, "model.visual."),),
    text="model.language_model.",
    provider="qwen_vl.qwen3_vl_provider.Qwen3VLModelProvider",
    config_class="qwen3_vl.configuration_qwen3_vl.Qwen3VLVisionConfig",
    fields=_QWEN_FIELDS,
    sizes={
        "depth": (r"vision_model\.decoder\.layers\.\d+\.", None),
        "deepstack_visual_indexes": (r"vision_model\.decoder\.deepstack_merger_list\.\d+\.", None),
        "num_position_embeddings": (r"vision_model\.pos_embed\.weight$", 0),
        "intermediate_size": (r"vision_model\.decoder\.layers\.\d+\.mlp\.linear_fc1\.weight$", 0),
        "out_hidden_size": (r"vision_model\.merger\.linear_fc2\.weight$", 0),
        **{
            key: (r"vision_model\.patch_embed\.proj\.weight$", axis)
            for axis, key in enumerate(("hidden_size", "in_channels", "temporal_patch_size", "patch_size"))
        },
    },
    heads="num_heads",
    fixed={"hidden_act": "gelu_pytorch_tanh"},
    unlike=_deepstack,
    states=((r"vision_model\..*\.(linear_(qkv|proj|fc1|fc2)|patch_norm)", True),),
)

_LAYER = "encoder.layers.*"
_IN_LAYER = (
    "layer_norm1",
    "layer_norm2",
    "mlp.fc1",
    "mlp.fc2",
    *(f"self_attn.{one}_proj" for one in ("q", "k", "v", "out")),
)
_TOWER = (
    *_leaves("embeddings.patch_embedding"),
    "embeddings.position_embedding.weight",
    *_leaves(*(f"{_LAYER}.{one}" for one in _IN_LAYER)),
    *_leaves("post_layernorm"),
)


def _projector(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the projector to the language model; Bridge's defaults are SigLIP 896's."""
    vision = config["vision_config"]
    text = config.get("text_config") or {}
    fields = {
        "input_size": vision.get("hidden_size"),
        "hidden_size": text.get("hidden_size", 2304),
        "image_size": vision.get("image_size", 224),
        "patch_dim": vision.get("patch_size", 16),
        "tokens_per_image": config.get("mm_tokens_per_image", 256),
        "layernorm_epsilon": vision.get("layer_norm_eps", 1e-6),
    }
    check_plain(fields)
    target = "megatron.bridge.models.gemma_vl.modeling_gemma3_vl.Gemma3VLMultimodalProjectorConfig"
    return {"vision_projector_config": {**fields, "_target_": target}}


def _places(vision: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Check that each patch has a position, and that there is no pooling head.

    `SiglipVisionModel` has a pooling head by default.
    """
    side = vision.get("image_size", 224)
    patch = vision["patch_size"]
    rows = shapes["vision_tower.embeddings.position_embedding.weight"][0]
    if type(side) is not int or (side // patch) ** 2 != rows:
        yield f"image_size is {side} of patches of {patch}, and the tensor has {quantity(rows, 'row')}"
    if vision.get("vision_use_head", True) is not False:
        yield "vision_use_head is not false, and there is no head"


_GEMMA3 = VisionTower(
    rules=(
        *(VisionMapping(f"vision_tower.vision_model.{name}", f"vision_tower.{name}") for name in _TOWER),
        VisionMapping(
            "multi_modal_projector.mm_soft_emb_norm.weight", "multi_modal_projector.mm_soft_embed_norm.weight"
        ),
        VisionMapping(
            "multi_modal_projector.mm_input_projection_weight", "multi_modal_projector.proj.weight", transposed=True
        ),
    ),
    spellings=(
        (r"^(model\.)?vision_tower\.(vision_model\.)?", "vision_tower.vision_model."),
        (r"^(model\.)?multi_modal_projector\.", "multi_modal_projector."),
    ),
    text="language_model.model.",
    provider="gemma_vl.gemma3_vl_provider.Gemma3VLModelProvider",
    config_class="siglip.configuration_siglip.SiglipVisionConfig",
    fields={"image_token_index": "image_token_id", "mm_tokens_per_image": "mm_tokens_per_image"},
    sizes={
        "num_hidden_layers": (r"vision_tower\.encoder\.layers\.\d+\.", None),
        "intermediate_size": (r"vision_tower\.encoder\.layers\.\d+\.mlp\.fc1\.weight$", 0),
        "hidden_size": (r"vision_tower\.embeddings\.patch_embedding\.weight$", 0),
        "patch_size": (r"vision_tower\.embeddings\.patch_embedding\.weight$", 2),
    },
    axes=False,
    states=((r"multi_modal_projector\.mm_soft_embed_norm", True), (r"multi_modal_projector\.proj", False)),
    fixed={"model_type": "siglip_vision_model"},
    further=_projector,
    unlike=_places,
)

VISION_TOWERS: Mapping[str, VisionTower] = {
    "qwen2_5_vl": _QWEN2_5,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": replace(
        _QWEN3,
        experts=True,
        provider="qwen_vl.qwen3_vl_provider.Qwen3VLMoEModelProvider",
        config_class="qwen3_vl_moe.configuration_qwen3_vl_moe.Qwen3VLMoeVisionConfig",
    ),
    "gemma3": _GEMMA3,
}
"""Vision towers by the `model_type` of the whole model."""


def vision_model_type(names: Collection[str]) -> str | None:
    """Return the `model_type` of a Megatron-Bridge checkpoint with these names.

    Returns:
        None if it has no vision tower.
    """
    vision_names = [name for name in names if not name.startswith(PREFIX)]
    if not vision_names or len(vision_names) == len(names) or any(_IN_NETS in name for name in names):
        return None
    experts = any(map(is_of_experts, names))
    fitting = (kind for kind, tower in VISION_TOWERS.items() if tower.experts == experts and tower.holds(vision_names))
    return next(fitting, None)
