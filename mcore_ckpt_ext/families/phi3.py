"""Phi-3, Phi-3.5 and Phi-4 of up to 4096 positions, and Phi-4-mini (partial rotary embedding)."""

from __future__ import annotations

from typing_extensions import override

from mcore_ckpt_ext.families import parts
from mcore_ckpt_ext.families.attention_settings import sliding_window
from mcore_ckpt_ext.families.common_settings import NO_BIASES, llama_like
from mcore_ckpt_ext.families.family import Family, Rule
from mcore_ckpt_ext.families.rope import UnscaledRope
from mcore_ckpt_ext.families.rows import KEY, QUERY, VALUE, concatenate
from mcore_ckpt_ext.families.settings import Forbidden, Mapped, Neutral, Requires
from mcore_ckpt_ext.job.model_arguments import ModelArguments

_OURS = "decoder.layers.{layer}"
_THEIRS = "model.layers.{layer}"


class Phi3(Family):
    """Like Llama, with a sliding window, fused query, key and value, and fused gate and up projection.

    `Phi3Config` treats scaling of type `yarn` as `longrope`, and refuses every other type
    (`convert_rope_params_to_dict`, `validate_rope`, transformers 4.43 to 5.23).
    """

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    rules = (
        parts.EMBEDDING,
        parts.ATTENTION_OUTPUT,
        Rule(
            f"{_THEIRS}.self_attn.qkv_proj.weight",
            f"{_OURS}.self_attention.linear_qkv.weight",
            concatenate(QUERY, KEY, VALUE),
        ),
        parts.GATE_AND_UP,
        parts.MLP[-1],
        parts.ATTENTION_NORM,
        parts.MLP_NORM[0],
        *parts.OUTPUT,
    )
    # A key of `longrope`, which is refused, and the dropout of embeddings, which is also Megatron's `hidden_dropout`.
    without_effect = ("original_max_position_embeddings", "embd_pdrop")
    settings = (
        *llama_like(epsilon=1e-5, positions=UnscaledRope(partial=1.0)),
        Mapped("resid_pdrop", "hidden_dropout", 0.0),
        sliding_window(None),
        Forbidden("attention_bias", "lm_head_bias", "mlp_bias"),
        Neutral({"full_attn_mod": 1, "interpolate_factor": 1}),  # keys of Phi-4-mini, whose own code reads neither
        Requires(NO_BIASES),
    )

    @override
    def prefer_other_family(self, arguments: ModelArguments) -> list[str]:
        return ["all that Llama or Mistral is"] if arguments.rotary_percent == 1.0 else []
