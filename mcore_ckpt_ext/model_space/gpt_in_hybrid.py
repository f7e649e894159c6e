"""Maps the names of a hybrid model to those of the GPT checkpoint that its training continues.

Source: `gpt_compatible_layer_maps` and `retarget_sharded_state_dict_to_gpt_checkpoint`
(megatron/core/dist_checkpointing/gpt_checkpoint_interop.py, core_v0.19.2): the attention layers of the pattern are, in
order, the attentions of the GPT's layers; its MLP or expert layers are the MLPs of these. Mamba layers are new.
"""

from __future__ import annotations

from collections.abc import Iterable

from mcore_ckpt_ext.errors import ModelMismatchError, UnsupportedCheckpointError, quantity
from mcore_ckpt_ext.model_space.names import Layer, layer_name, split_layer

_ATTENTION = "*"
_DENSE = "-"
_EXPERTS = "E"
_NEW = "M"
_FINAL_NORM = ("decoder.final_norm.", "decoder.final_layernorm.")


def names_in_gpt(pattern: str, layers: int | None, names: Iterable[str]) -> dict[str, str | None]:
    """Return the GPT's name of each parameter of a hybrid model; None for those that it does not have.

    Args:
        pattern: the pattern of the hybrid model's layers, `--hybrid-layer-pattern`.
        layers: the GPT's number of layers; None if unknown.
        names: model-space names of the hybrid model's parameters.

    Raises:
        UnsupportedCheckpointError: no GPT can be loaded into such a model.
        ModelMismatchError: a GPT with that many layers cannot be loaded.
    """
    main_pattern, _, further = pattern.partition("/")
    kinds = main_pattern.replace("|", "")
    attention, linear = ([number for number, kind in enumerate(kinds) if kind in part] for part in ("*", "-E"))
    is_known = not further and {*kinds} <= {_ATTENTION, _DENSE, _EXPERTS, _NEW} and not {_DENSE, _EXPERTS} <= {*kinds}
    if not is_known or not attention or len(attention) != len(linear):
        raise UnsupportedCheckpointError(
            "a GPT checkpoint cannot be loaded into a hybrid model with this pattern",
            found=f"--hybrid-layer-pattern {pattern}: {quantity(len(attention), 'attention layer')}, "
            f"{quantity(len(linear), 'MLP layer')}",
            expected=f"as many {_ATTENTION} as {_DENSE}, or as {_EXPERTS}; no others except {_NEW}",
            hint="choose another --hybrid-layer-pattern; Megatron's own conversion (gpt_checkpoint_interop.py) "
            "has the same limit",
        )
    if layers is not None and layers != len(attention):
        raise ModelMismatchError(
            "the pattern of the hybrid model does not have the layers of the GPT",
            found=f"{len(attention)} attention and as many MLP layers in {pattern}",
            expected=f"{layers}, as in the checkpoint",
            hint="choose a --hybrid-layer-pattern with as many of each as the GPT has layers",
        )
    number_in_gpt = {number: place for part in (attention, linear) for place, number in enumerate(part)}
    renamed: dict[str, str | None] = {}
    for name in names:
        layer, suffix = split_layer(name)
        if layer is None:
            renamed[name] = name.replace(*_FINAL_NORM)
        elif layer.number in number_in_gpt:
            renamed[name] = layer_name(Layer(layer.block, number_in_gpt[layer.number]), suffix)
        else:
            renamed[name] = None
    return renamed
