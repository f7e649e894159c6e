"""The tensors of a Hugging Face folder that Megatron's model does not have, each with its reason."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod

from mcore_ckpt_ext.formats.hugging_face.folder import StoredTensor
from mcore_ckpt_ext.formats.unread_state import OTHER, UnreadState
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.plan import ITEM_SIZE

# Tensors that the model computes from its configuration: frequencies and masks.
_BUFFERS = ("inv_freq", "masked_bias", ".attn.bias", ".attention.bias")


def left_out_tensors(
    names: Iterable[str],
    stored: Mapping[str, StoredTensor],
    vision: Collection[str],
    of_activations: Collection[str],
) -> Iterator[UnreadState]:
    """Yield an entry for each tensor that is not read.

    Args:
        names: the tensors that are not read.
        stored: all tensors.
        vision: the tensors of other parts, such as a vision tower.
        of_activations: the scales of activations.
    """
    for name in names:
        tensor = stored.get(name)
        kind = WEIGHT
        why = "no equivalent in Megatron"
        if name in vision:
            why = "not of the language model: only the text is read"
        elif name in of_activations:
            kind = OTHER
            why = "a scale of activations, which only quantized inference uses"
        elif name.endswith(_BUFFERS):
            kind = OTHER
        nbytes = 0 if tensor is None else prod(tensor.shape) * ITEM_SIZE[tensor.extent.dtype]
        yield UnreadState(name, kind, nbytes, why)
