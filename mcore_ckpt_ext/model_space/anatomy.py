"""Maps a name to its part of the model: language model, vocabulary, towers, blocks of layers.

A block is a module with layers: `decoder` of GPT and T5, `encoder` of BERT and T5, and both within a part of a larger
model: `language_model.decoder`, `vision_model.decoder`, `modality_submodules.images.encoders.clip.decoder`. A pipeline
divides the language model; vision and audio towers and projectors are entirely on its first stage. Sources, core_v0.7.0
to 0.19.2: megatron/core/models/gpt/gpt_model.py, bert/bert_model.py, T5/t5_model.py, multimodal/llava_model.py (with
`add_encoder` of pretrain_vlm.py: the first stage), mimo/model/base.py.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
VOCABULARY = (WORD_EMBEDDINGS, OUTPUT_LAYER)
"""The parameters of a GPT with a row for every token; padding adds rows."""
BLOCKS = ("decoder", "encoder")
"""The modules with layers, numbered across the whole model: `decoder.layers.3`."""
LANGUAGE_MODEL = "language_model"
"""The module that contains the language model of a larger model."""
BLOCK = rf"(?:\w+\.)*?(?:{'|'.join(BLOCKS)})"
"""The regular expression of a block's name."""
_IN_LAYER = re.compile(rf"^({BLOCK})\.layers\.")
_LANGUAGE_PREFIX = re.compile(rf"^((?:\w+\.)*?{LANGUAGE_MODEL}\.)")
# Parameters that T5 registers under two names (t5_model.py, core_v0.7.0 to 0.19.2). The second is the name of the
# optimizer's state.
_HEAD = "lm_head."
_HYBRID_NORM = "decoder.final_norm.weight"
_TWICE = ((f"{_HEAD}output_layer.", "output_layer."), ("embedding.position_embeddings.", "position_embeddings."))


def block_of(key: str) -> str | None:
    """Return the block of a model-space name or a sharded key; None outside the layers."""
    match = _IN_LAYER.match(key)
    return match[1] if match else None


def language_prefix(name: str) -> str:
    """Return the prefix of a language model's names: `language_model.` in a larger model, else empty."""
    match = _LANGUAGE_PREFIX.match(name) if LANGUAGE_MODEL in name else None
    return match[1] if match else ""


def is_language_block(block: str) -> bool:
    """Return whether the layers of a block belong to a language model, not to a vision or audio tower."""
    return block.removeprefix(language_prefix(block)) in BLOCKS


def pipelined_block(names: Iterable[str]) -> str | None:
    """Return the block that a pipeline divides: the language model's decoder, else its encoder (BERT).

    Returns:
        None if there is no block, or if there are several (T5).
    """
    names = list(names)
    prefixes = {language_prefix(name) for name in names} - {""} or {""}
    present = {block for name in names if (block := block_of(name)) is not None}
    blocks = {f"{prefix}{block}" for prefix in prefixes for block in BLOCKS} & present
    return blocks.pop() if len(blocks) == 1 else None


def word_embeddings_of(name: str) -> str:
    """Return the name of the word embeddings of the language model that a name belongs to."""
    return language_prefix(name) + WORD_EMBEDDINGS


def output_layer_of(name: str) -> str:
    """Return the name of the output layer of the language model that a name belongs to."""
    return language_prefix(name) + OUTPUT_LAYER


def is_word_embeddings(name: str) -> bool:
    """Return whether a name denotes a language model's word embeddings."""
    return name == word_embeddings_of(name)


def word_embeddings_in(names: Iterable[str]) -> str | None:
    """Return the name of the word embeddings among a model's names; None if there are none."""
    return next(filter(is_word_embeddings, names), None)


def is_output_layer(name: str) -> bool:
    """Return whether a name denotes a language model's output weight, which T5 also has in its head."""
    unprefixed = name.removeprefix(language_prefix(name))
    return unprefixed.removeprefix(_HEAD) == OUTPUT_LAYER


def precedes_layers(name: str, prefix: str) -> bool:
    """Return whether a parameter outside the layers is before the first one, on the first pipeline stage.

    The language model begins with its embedding. Towers and projectors are not part of it, and are on the first stage
    (`model_provider` of pretrain_vlm.py, core_v0.13.0 to 0.19.2).

    Args:
        name: a parameter that is in no layer of the block that the pipeline divides.
        prefix: the prefix of the language model's names, as `language_prefix` returns it.
    """
    return not name.startswith(prefix) or name.removeprefix(prefix).startswith(("embedding.", "position_embeddings."))


def is_of_prediction(name: str) -> bool:
    """Return whether a parameter belongs to layers for multi-token prediction.

    Example: `mtp.layers.0.eh_proj.weight`.
    """
    return name.removeprefix(language_prefix(name)).startswith("mtp.")


def is_in_vocabulary(name: str) -> bool:
    """Return whether a parameter has a row for every token."""
    return is_word_embeddings(name) or is_output_layer(name) or is_output_layer(name.replace(".bias", ".weight"))


def second_names(names: Container[str]) -> dict[str, str]:
    """Return the first name of each parameter with two names, mapped to the second.

    The optimizer uses the second.
    """
    leaves = ("weight", "bias")
    pairs = ((first + leaf, last + leaf) for first, last in _TWICE for leaf in leaves)
    return {first: last for first, last in pairs if first in names and last in names}


def leaves_out_state(key: str, names: Iterable[str]) -> bool:
    """Return whether the sharded state dict omits an output layer's extra state, as GPT's does.

    The other model classes do not override `sharded_state_dict`, and store it: BERT, and hybrid models.

    Source: `GPTModel.sharded_state_dict` (gpt_model.py, core_v0.7.0 to 0.19.2).

    Args:
        key: the key of the extra state.
        names: the names of the model's weights.
    """
    is_own = key.removeprefix(language_prefix(key)).startswith("output_layer.")
    return is_own and hybrid_prefix(names) is None and not any(name.startswith(_HEAD) for name in names)


def hybrid_prefix(names: Iterable[str]) -> str | None:
    """Return the prefix of a hybrid language model's names; None if the model is not hybrid.

    The last norm of its blocks has a name of its own: `HybridStack.final_norm` (hybrid_block.py, core_v0.19.2;
    `MambaStack` of mamba_block.py since core_v0.7.0).

    Args:
        names: the names of the model's weights.
    """
    norms = (name for name in names if name.removeprefix(language_prefix(name)) == _HYBRID_NORM)
    return next(map(language_prefix, norms), None)
