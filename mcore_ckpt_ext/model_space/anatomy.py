"""The parts of a model that a name belongs to: its language model with the vocabulary, its towers, blocks of layers.

A block is a module with layers: `decoder` of GPT and T5, `encoder` of BERT and T5, and either of them inside of a part
of a larger model: `language_model.decoder`, `vision_model.decoder`, `modality_submodules.images.encoders.clip.decoder`.
A pipeline divides the language model; towers, which see or hear, and projectors stand whole on its first stage.
Sources, core_v0.7.0 to 0.19.2: megatron/core/models/gpt/gpt_model.py, bert/bert_model.py, T5/t5_model.py,
multimodal/llava_model.py (with `add_encoder` of pretrain_vlm.py: the first stage), mimo/model/base.py.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
VOCABULARY = (WORD_EMBEDDINGS, OUTPUT_LAYER)
"""The parameters of a GPT with a row for every token, which padding makes longer."""
BLOCKS = ("decoder", "encoder")
"""The modules with layers, numbered through the whole model: `decoder.layers.3`."""
LANGUAGE_MODEL = "language_model"
"""The module that holds the language model of a larger one."""
BLOCK = rf"(?:\w+\.)*?(?:{'|'.join(BLOCKS)})"
"""The expression of a block's name."""
_IN_LAYER = re.compile(rf"^({BLOCK})\.layers\.")
_LANGUAGE_PREFIX = re.compile(rf"^((?:\w+\.)*?{LANGUAGE_MODEL}\.)")
# What T5 registers under two names, and which of them comes last (t5_model.py, core_v0.7.0 to 0.19.2): the name by
# which an optimizer's state is stored.
_HEAD = "lm_head."
_TWICE = ((f"{_HEAD}output_layer.", "output_layer."), ("embedding.position_embeddings.", "position_embeddings."))


def block_of(key: str) -> str | None:
    """The block that a model-space name or a sharded key belongs to; None outside the layers."""
    match = _IN_LAYER.match(key)
    return match[1] if match else None


def language_prefix(name: str) -> str:
    """What stands before a name of the language model: `language_model.` in a larger one, nothing in a plain one."""
    match = _LANGUAGE_PREFIX.match(name) if LANGUAGE_MODEL in name else None
    return match[1] if match else ""


def language_prefixes(names: Iterable[str]) -> set[str]:
    """The prefixes of all language models among the names of a whole model: usually one."""
    found = {language_prefix(name) for name in names}
    return found - {""} or {""}


def is_language_block(block: str) -> bool:
    """Whether the layers of a block are a language model's, not those of a tower that sees or hears."""
    return block.removeprefix(language_prefix(block)) in BLOCKS


def pipelined_block(names: Iterable[str]) -> str | None:
    """The block that a pipeline divides: the decoder of the language model, or the encoder where it has none (BERT).

    None where there is none, or where several would have to be divided (T5).
    """
    names = list(names)
    prefixes = language_prefixes(names)
    present = {block for name in names if (block := block_of(name)) is not None}
    found = {f"{prefix}{block}" for prefix in prefixes for block in BLOCKS} & present
    return found.pop() if len(found) == 1 else None


def word_embeddings_of(name: str) -> str:
    """The name of the word embeddings of the language model that a name belongs to."""
    return language_prefix(name) + WORD_EMBEDDINGS


def output_layer_of(name: str) -> str:
    """The name of the output layer of the language model that a name belongs to."""
    return language_prefix(name) + OUTPUT_LAYER


def is_word_embeddings(name: str) -> bool:
    """Whether a name is that of a language model's word embeddings."""
    return name == word_embeddings_of(name)


def word_embeddings_in(names: Iterable[str]) -> str | None:
    """The name of the word embeddings among those of a model; None of a model without them."""
    return next(filter(is_word_embeddings, names), None)


def is_output_layer(name: str) -> bool:
    """Whether a name is that of a language model's output weight, which T5 also has in its head."""
    own = name.removeprefix(language_prefix(name))
    return own.removeprefix(_HEAD) == OUTPUT_LAYER


def precedes_layers(name: str, prefix: str) -> bool:
    """Return whether a parameter outside the layers stands on the first stage of a pipeline, before its first layer.

    The language model begins with its embedding; towers and projectors, which are not part of it, stand on the first
    stage (`model_provider` of pretrain_vlm.py, core_v0.13.0 to 0.19.2).

    Args:
        name: of a parameter that is in no layer of the block that the pipeline divides.
        prefix: of the language model's names, as `language_prefix` returns it.
    """
    return not name.startswith(prefix) or name.removeprefix(prefix).startswith(("embedding.", "position_embeddings."))


def is_of_prediction(name: str) -> bool:
    """Whether a parameter belongs to the layers of multi-token prediction: `mtp.layers.0.eh_proj.weight`."""
    return name.removeprefix(language_prefix(name)).startswith("mtp.")


def in_vocabulary(name: str) -> bool:
    """Whether a parameter has a row for every token."""
    return is_word_embeddings(name) or is_output_layer(name) or is_output_layer(name.replace(".bias", ".weight"))


def second_names(names: Container[str]) -> dict[str, str]:
    """Names of parameters that have another one, too, and that other one, under which an optimizer knows them."""
    leaves = ("weight", "bias")
    pairs = ((first + leaf, last + leaf) for first, last in _TWICE for leaf in leaves)
    return {first: last for first, last in pairs if first in names and last in names}


def leaves_out_state(key: str, names: Iterable[str]) -> bool:
    """Whether the model does not store an output layer's extra state in sharded form, as a GPT does not, but BERT does.

    Source: `GPTModel.sharded_state_dict` (gpt_model.py, core_v0.7.0 to 0.19.2).

    Args:
        key: of the extra state.
        names: of the model's weights.
    """
    is_own = key.removeprefix(language_prefix(key)).startswith("output_layer.")
    return is_own and not any(name.startswith(_HEAD) for name in names)
