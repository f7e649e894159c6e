"""Scales a published `config.json` down: all kinds of layers and all keys other than sizes remain.

Standard library only. Used by the table of keys that classes of transformers read (`scripts/config_reads.py`) and by
the tests of published configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCABULARY = 300
_HEADS = ("num_attention_heads", "n_head")
_GROUPS = ("num_key_value_heads", "num_query_groups", "multi_query_group_num", "num_kv_heads")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
# The number of layers after which a pattern repeats.
_INTERVALS = (
    "full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern", "index_topk_freq",
    "no_rope_layer_interval", "decoder_sparse_step",
)  # fmt: skip
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token", "moe_topk", "top_k_experts")
# Sizes of a head, all divided by one number, so that their sums and fractions remain consistent.
_HEAD_SIZES = (
    "head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "rotary_dim", "index_head_dim",
    "linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "ssm_state_size", "kv_channels",
)  # fmt: skip
_DIVISOR = 8
_RANKS = {"q_lora_rank": 24, "kv_lora_rank": 16, "moe_latent_size": 16}
_WIDTHS = (
    "intermediate_size", "ffn_hidden_size", "n_inner", "shared_expert_intermediate_size", "dense_intermediate_size",
    "moe_shared_expert_intermediate_size", "mlp_intermediate_size", "shared_intermediate_size", "expert_dim",
)  # fmt: skip
_WINDOWS = ("sliding_window", "sliding_window_size")
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "depth": 2, "num_heads": 2,
    "num_attention_heads": 2, "num_position_embeddings": 16, "image_size": 56, "patch_size": 14,
    "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [0], "vt_hidden_size": 32, "vt_intermediate_size": 48,
    "vt_num_hidden_layers": 2, "vt_num_attention_heads": 2, "mm_hidden_size": 32,
}  # fmt: skip
_HIDDEN_OF_TEXT = ("out_hidden_size", "text_hidden_size")


def scaled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a tiny model that differs from the published one only in size."""
    inside = config.get("text_config")
    if isinstance(inside, Mapping):
        text = scaled(inside)
        found = {**config, "text_config": text}
    else:
        text = found = _scaled_text(config)
    if isinstance(found.get("vision_config"), Mapping):
        found["vision_config"] = _scaled_vision(found["vision_config"], text["hidden_size"])
    return {**found, **_scaled_tokens(found)}


def _scaled_text(config: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config)
    latent = bool(config.get("kv_lora_rank"))
    heads, groups = _scaled_heads(config, latent)
    hidden_key = "n_embd" if "n_embd" in config else "hidden_size"
    size = config[hidden_key]
    count = next((config[key] for key in _HEADS if key in config), None)
    hidden = 64 if latent or count is None else heads * max(_DIVISOR, size // count // _DIVISOR)
    if config.get("head_dim"):
        hidden = -(-hidden // (16 * heads)) * 16 * heads
    changes: dict[str, Any] = {hidden_key: hidden, "vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY}
    changes |= dict.fromkeys(_HEADS, heads) | dict.fromkeys(_GROUPS, groups)
    changes |= {key: max(4, config[key] // _DIVISOR) for key in _HEAD_SIZES if config.get(key)}
    changes |= {key: size for key, size in _RANKS.items() if config.get(key)}
    changes |= {key: max(32, config[key] // 2048 * 16 + 16) for key in _WIDTHS if config.get(key)}
    changes |= {key: min(16, max(8, config[key] // 16)) for key in _WINDOWS if config.get(key)}
    narrow = 24 if hidden != 48 else 40
    changes |= {"moe_intermediate_size": narrow, "moe_ffn_hidden_size": narrow, "index_topk": 8, "index_n_heads": 4}
    changes |= _scaled_experts(config) | _scaled_mixers(config)
    if config.get("expand") and config.get("num_heads"):  # Mamba 2: the heads fill the width of a mixer
        changes["num_heads"] = config["expand"] * hidden // changes["head_dim"]
    found |= {key: value for key, value in changes.items() if config.get(key) is not None}
    _scale_layers(found)
    _scale_axes(found)
    return found


def _scaled_heads(config: Mapping[str, Any], latent: bool) -> tuple[int, int]:
    count = next((config[key] for key in _HEADS if config.get(key)), 4)
    groups = next((config[key] for key in _GROUPS if config.get(key)), count)
    if latent or groups == count:
        return 4, 4
    kept = min(groups, 2)
    return kept * min(count // groups, 3), kept


def _scaled_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    chosen = min(next((config[key] for key in _CHOSEN if config.get(key)), 2), 4)
    found = {**dict.fromkeys(_EXPERTS, 8), **dict.fromkeys(_CHOSEN, chosen)}
    if (config.get("n_group") or 1) > 1:
        found |= {"n_group": 4, "topk_group": min(config["topk_group"], 2)}
    return found


def _scaled_mixers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Scale the heads of Mamba mixers and of gated delta nets."""
    keys, values = config.get("linear_num_key_heads") or 1, config.get("linear_num_value_heads") or 1
    return {
        "linear_num_key_heads": 2, "linear_num_value_heads": 2 * max(1, values // keys), "mamba_num_heads": 8,
        "n_groups": 2, "chunk_size": 8, "mamba_n_heads": 8,
    }  # fmt: skip


def _scale_layers(config: dict[str, Any]) -> None:
    """Keep as many of the first layers as are needed for all kinds of layers."""
    key = next((key for key in _LAYERS if key in config), None)
    pattern = config.get("hybrid_override_pattern")
    total = len(pattern) if pattern else config[key] if key else 0
    each = [name for name, value in config.items() if isinstance(value, (list, str)) and len(value) == total]
    needed = [2, (config.get("first_k_dense_replace") or 0) + 1]
    needed += [1 + max(config[name].index(kind) for kind in [*dict.fromkeys(config[name])]) for name in each]
    needed += [value + 1 for name in _INTERVALS if isinstance(value := config.get(name), int) and value > 1]
    kept = min(total, max(needed))
    if key:
        config[key] = kept
    for name in each:
        config[name] = config[name][:kept]


def _scale_axes(config: dict[str, Any]) -> None:
    """Scale lists with a number for each frequency of a head, or for each axis of a position in an image."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = config.get(name)
        if not isinstance(scaling, Mapping):
            continue
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if scaling.get("short_factor"):
            rotated = int(head * (config.get("partial_rotary_factor") or 1.0)) // 2
            factors = {key: value[:rotated] for key, value in scaling.items() if isinstance(value, list)}
            config[name] = scaling = {**scaling, **factors}
        if scaling.get("mrope_section"):
            part = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
            total, axes = int(head * part) // 2, len(scaling["mrope_section"])
            section = [total // axes + (axis < total % axes) for axis in range(axes)]
            config[name] = {**scaling, "mrope_section": section}


def _scaled_vision(config: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    changes = {**_VISION, **dict.fromkeys(_HIDDEN_OF_TEXT, hidden)}
    return {**config, **{key: value for key, value in changes.items() if key in config}}


def _scaled_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Limit token IDs to the vocabulary."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key.endswith(("_token_id", "_token_index")):
            several = isinstance(value, list)
            numbers = [one if one is None or one < VOCABULARY else one % VOCABULARY
                       for one in (value if several else [value])]  # fmt: skip
            found[key] = numbers if several else numbers[0]
    return found
