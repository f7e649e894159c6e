"""Sarvam 30B (Sarvam MoE)."""

from __future__ import annotations

from mcore_ckpt_ext.families.bailing import RULES, WITHOUT_EFFECT, settings_of_ling
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.rope import Rope


class SarvamMoE(Family):
    """Ling 2.0 without multi-token prediction, and with RoPE on whole heads.

    Its folders contain their own code (`modeling_sarvam_moe.py`). Like Megatron, it normalizes the weights of several
    chosen experts, but not the weight of a single one. Names and rows are also those of Megatron-Bridge 0.6.2
    (sarvam/sarvam_moe_bridge.py).
    """

    model_type = "sarvam_moe"
    architecture = "SarvamMoEForCausalLM"
    contained_in = "GLM-4.5"
    rules = RULES
    without_effect = (*WITHOUT_EFFECT, "attn_implementation")
    settings = settings_of_ling(head=256, positions=Rope(10000.0), experts=(128, 6, 1024), groups=(1, 1), scaling=2.5)
