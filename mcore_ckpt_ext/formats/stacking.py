"""Decides whether Megatron stacks the layers of a model into one array for each parameter.

Source: `TransformerBlock.sharded_state_dict` (megatron/core/transformer/transformer_block.py, core_v0.7.0 to 0.19.2):
homogeneous blocks are stacked, heterogeneous ones have the layer's number in each key. Hybrid models always have it
(`MambaStack.sharded_state_dict`, megatron/core/ssm/mamba_block.py, core_v0.9.0 to 0.18.2;
`HybridStack.sharded_state_dict`, megatron/core/models/hybrid/hybrid_block.py, 0.19.0 to 0.19.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.model_space.names import Layer, ShardedKey, parse, split_layer

# A block is heterogeneous if one of these arguments differs from its default.
_ALWAYS = (
    "hetereogenous_dist_checkpoint",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
)
# Layers that are never stacked: of transformers (Megatron's name is `self_attention`), and Mamba layers.
_UNSTACKED = ("self_attn.", "mixer.")


def sharded_keys(names: Sequence[str], arguments: JobArguments) -> dict[str, ShardedKey]:
    """Return Megatron's array for each parameter, and its index on the axes of layers and experts."""
    stacked = stacked_blocks(names, arguments)
    return {str(parsed): parsed.sharded_key(parsed.block in stacked) for parsed in map(parse, names)}


def stacked_blocks(names: Iterable[str], arguments: JobArguments) -> set[str]:
    """Return the blocks whose layers Megatron stacks, in a model with these parameters."""
    if any(arguments.raw.get(name) for name in _ALWAYS):
        return set()
    frequencies = (arguments.moe_layer_freq, arguments.linear_attention_freq)
    if any(value if isinstance(value, Sequence) else (value or 0) > 1 for value in frequencies):
        return set()
    by_layer: dict[Layer, set[str]] = {}
    for layer, suffix in map(split_layer, names):
        if layer is not None:
            by_layer.setdefault(layer, set()).add(suffix)
    kinds: dict[str, set[frozenset[str]]] = {}
    for layer, suffixes in by_layer.items():
        kinds.setdefault(layer.block, set()).add(frozenset(suffixes))
    return {block for block, variants in kinds.items() if len(variants) == 1 and not any(map(_is_unstacked, *variants))}


def _is_unstacked(suffix: str) -> bool:
    """Return whether a layer is of a kind that is never stacked: a transformers class (SigLIP), or Mamba."""
    return suffix.startswith(_UNSTACKED)
