"""Names of low-rank adapters within the names of parameters, in Megatron-Bridge and in ms-swift.

    decoder.layers.3.self_attention.linear_qkv.adapter.linear_in.weight             LoRA, DoRA
    decoder.layers.3.self_attention.linear_qkv.adapter.linear_out.weight
    decoder.layers.3.self_attention.linear_qkv.adapter.weight_magnitude             DoRA
    decoder.layers.3.self_attention.linear_qkv.adapter.adapter_q.linear_in.weight   CanonicalLoRA
    decoder.layers.3.self_attention.linear_qkv.lora_A.default.weight                ms-swift's LoRA
    decoder.layers.3.self_attention.linear_qkv.lora_B.default.weight

Sources: `AdapterWrapper.sharded_state_dict` (peft/adapter_wrapper.py), peft/canonical_lora.py, peft/dora_layers.py;
megatron-bridge 0.3.1. `LoraParallelLinear` (tuners/lora.py) of mcore-bridge 1.2.2, in ms-swift until 4.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MARK = ".adapter."
IN = "linear_in.weight"
OUT = "linear_out.weight"
MAGNITUDE = "weight_magnitude"
PARTS = {"linear_qkv": ("adapter_q", "adapter_k", "adapter_v"), "linear_fc1": ("adapter_gate", "adapter_up")}
"""The adapters of one linear in CanonicalLoRA, in the order of its rows."""

_SWIFT_S_FIRST = ".linear_fc1.lora_B.default.weight"
_OF_SWIFT = re.compile(r"\.lora_([AB])\.default\.weight$")
_TARGETS = {"linear_qkv": ("linear_q", "linear_k", "linear_v"), "linear_fc1": ("linear_fc1_gate", "linear_fc1_up")}

_FIRST_LINEAR = re.compile(
    r"\.linear_fc1\.adapter\.(?:(adapter_gate\.|adapter_up\.)?linear_out\.weight|weight_magnitude)$"
)


def is_adapter(name: str) -> bool:
    """Return whether a model-space name denotes a tensor of an adapter."""
    return MARK in name or is_swift_name(name)


def is_swift_name(name: str) -> bool:
    """Return whether a name denotes a tensor of an adapter in ms-swift."""
    return ".lora_A." in name or ".lora_B." in name


def to_bridge_name(name: str) -> str:
    """Convert ms-swift's name to Megatron-Bridge's; return others, and those of experts, unchanged."""
    return _OF_SWIFT.sub(lambda match: MARK + (IN if match[1] == "A" else OUT), name)


def targets_of(linear: str) -> list[str]:
    """Return CanonicalLoRA's names of the linears in one (`_init_target_match_state`, canonical_lora.py)."""
    before, dot, last = linear.rpartition(".")
    return [before + dot + target for target in _TARGETS.get(last, (last,))]


def rank_ordered_adapters(names: Iterable[str], gated: bool) -> list[str]:
    """Return adapter tensors whose stored row order depends on the tensor parallel size.

    Megatron-Bridge stores the rows of every adapter of a `linear_fc1` as those of a gate and an up projection. That is
    wrong if the adapter belongs to only one of them, or if the linear has no gate. It stores the magnitudes of both as
    if there were no gate (`sharded_state_dict` of `ParallelLinearAdapter` and `ParallelLinearDoRAAdapter`, 0.3.1 and
    0.6.2; for a linear without a gate 0.6.2 is correct). Under another tensor parallel size, its own load then
    distributes wrong rows.

    ms-swift stores the rows of `lora_B` of a gated linear as if there were no gate
    (`LoraParallelLinear.sharded_state_dict`).

    Args:
        names: model-space names.
        gated: whether the model's MLPs have gates.
    """
    ordered = []
    for name in names:
        if gated and name.endswith(_SWIFT_S_FIRST):
            ordered.append(name)
        if match := _FIRST_LINEAR.search(name):
            is_wrong = bool(match[1]) or (gated == name.endswith(MAGNITUDE))
            ordered += [name] if is_wrong else []
    return ordered
