"""Converts the names of a model's norms between the two layer specs.

Both specs have the same norms. Transformer Engine's spec fuses a norm with the linear after it, if there is one. The
local spec has separate modules, but writes the norms of plain layers under the fused keys
(`sharded_state_dict_keys_map`). Source: megatron/core/models/gpt/gpt_layer_specs.py, core_v0.12.1 to 0.19.2.

    norm before                 Transformer Engine                             local
    attention                   linear_qkv.layer_norm_                         linear_qkv.layer_norm_
    latent attention            input_layernorm.                               input_layernorm.
    its up projections          linear_q_up_proj.layer_norm_, linear_kv_...    q_layernorm., kv_layernorm.
    a dense MLP                 mlp.linear_fc1.layer_norm_                     mlp.linear_fc1.layer_norm_
    a dense MLP, latent         mlp.linear_fc1.layer_norm_                     pre_mlp_layernorm.
    experts                     pre_mlp_layernorm.                             mlp.linear_fc1.layer_norm_
    experts, latent             pre_mlp_layernorm.                             pre_mlp_layernorm.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, join_some
from mcore_ckpt_ext.model_space.names import with_prefix_replaced

_IN_LAYER = re.compile(r"^(.*\blayers\.\d+\.(?:transformer_layer\.)?)(.+)$")
_ATTENTION = "self_attention."
_MLP = ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
_LATENT = (
    (f"{_ATTENTION}linear_q_up_proj.layer_norm_", f"{_ATTENTION}q_layernorm."),
    (f"{_ATTENTION}linear_kv_up_proj.layer_norm_", f"{_ATTENTION}kv_layernorm."),
)
_KNOWN = (f"{_ATTENTION}linear_qkv.layer_norm_", _MLP[0], *(fused for fused, _ in _LATENT))
_ONLY_ENGINE = ("mixer.", "cross_attention.", "linear_attn.")


def names_under_spec(names: Collection[str], engine: bool) -> dict[str, str]:
    """Map a model's names, which have either layer spec, to names under one of them.

    Args:
        names: model-space names of all weights.
        engine: True for Transformer Engine's spec, False for the local one.

    Raises:
        UnsupportedCheckpointError: only one of the two specs has a layer of some kind.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        if match := _IN_LAYER.match(name):
            layers.setdefault(match[1], []).append(match[2])
    unknown = [
        layer + suffix for layer, suffixes in layers.items() for suffix in suffixes if _is_strange(suffix, suffixes)
    ]
    if unknown:
        raise UnsupportedCheckpointError(
            "the names of this layer's parameters in the other layer spec are unknown",
            found=join_some(unknown, 3),
            expected="attention, plain or latent, and an MLP or experts",
            hint="keep the layer spec: leave --transformer-impl out",
        )
    renamed = {
        layer + suffix: layer + with_prefix_replaced(suffix, _pairs(suffixes, engine))
        for layer, suffixes in layers.items()
        for suffix in suffixes
    }
    return {name: renamed.get(name, name) for name in names}


def _is_strange(suffix: str, layer: Collection[str]) -> bool:
    fused = ".layer_norm_" in suffix and not suffix.startswith(_KNOWN)
    # A norm of queries that are not compressed, in latent attention.
    alone = suffix.startswith(_LATENT[0][1]) and _is_latent(layer) and not _has(layer, f"{_ATTENTION}linear_q_up_proj.")
    return fused or alone or suffix.startswith(_ONLY_ENGINE)


def _is_latent(layer: Collection[str]) -> bool:
    return _has(layer, f"{_ATTENTION}linear_kv_up_proj.")


def _has(layer: Collection[str], *modules: str) -> bool:
    return any(suffix.startswith(modules) for suffix in layer)


def _pairs(suffixes: Collection[str], engine: bool) -> Iterator[tuple[str, str]]:
    """Yield the replacements in the names of one layer."""
    latent = _is_latent(suffixes)
    experts = _has(suffixes, "mlp.experts.", "mlp.router.")
    fused, separate = _MLP
    is_fused = not experts if engine else not latent
    yield (separate, fused) if is_fused else (fused, separate)
    if latent:
        yield from ((separate, fused) if engine else (fused, separate) for fused, separate in _LATENT)
