"""The model that a Hugging Face folder's `config.json` describes; tensors are not read."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import (
    CheckpointError,
    ModelMismatchError,
    UnsupportedCheckpointError,
    quantity,
    with_indefinite_article,
)
from mcore_ckpt_ext.families.config_keys import NeutralKeys, neutral_keys
from mcore_ckpt_ext.families.contradictions import contradictions
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.recognition import family_of_config
from mcore_ckpt_ext.families.text_parts import TIED, class_of_text, text_config, text_names, tied_by_default
from mcore_ckpt_ext.formats.hugging_face.folder import CONFIG, read_config, stored_names
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import ModelArguments
from mcore_ckpt_ext.storage.dtypes import dtype_named

TRANSFORMER_ENGINE = "transformer_engine"
LOCAL = "local"
_PADDING = 128  # `--make-vocab-size-divisible-by`


@dataclass(frozen=True)
class DescribedModel:
    """The content of a `config.json`.

    Attributes:
        config: all of it, or the part that describes the text.
        family: the model's family.
        arguments: the arguments of a job that trains it.
        whole: the `model_type` of a model that has other parts than the text; empty for a text model.
        whole_config: the configuration of all parts.
        neutral: keys that do not change what the model computes.
    """

    config: Mapping[str, Any]
    family: Family
    arguments: ModelArguments
    whole: str
    whole_config: Mapping[str, Any]
    neutral: NeutralKeys


def described_model(folder: Path, family: Family | None = None, transformer_impl: str = "") -> DescribedModel:
    """Read the `config.json` of a folder.

    Args:
        folder: the folder.
        family: the model's family; by default recognized from `config.json`.
        transformer_impl: the layer spec of the job that will read it.

    Raises:
        UnreadableCheckpointError: `config.json` is missing or damaged.
        UnsupportedCheckpointError: the kind of model is not supported, at all or under that layer spec.
    """
    whole = read_config(folder)
    text = text_config(whole)
    config = text or whole
    family = family or family_of_config(config, str(folder / CONFIG), lambda: stored_names(folder))
    if text and tied_by_default(whole) and family.output_layer not in text_names(stored_names(folder)).values():
        text[TIED] = True
    if family.needs_engine and transformer_impl == LOCAL:
        raise UnsupportedCheckpointError(
            f"Megatron builds {with_indefinite_article(family.name)} only with Transformer Engine's layers",
            found=f"--transformer-impl {LOCAL}",
            where=str(folder),
            hint="leave the option out",
        )
    neutral = neutral_keys(config, class_of_text(whole, config), whole)
    arguments = family.arguments(config, neutral)
    arguments = arguments.replace(transformer_impl=transformer_impl or TRANSFORMER_ENGINE)
    if mismatches := family.mismatches(arguments):
        raise UnsupportedCheckpointError(
            f"config.json describes {with_indefinite_article(family.name)} that Megatron would compute differently",
            found="; ".join(mismatches),
            where=str(folder / CONFIG),
            hint="map it with a family of your own (python -m pydoc mcore_ckpt_ext.families.family): --family "
            "path.py:Name",
        )
    return DescribedModel(config, family, arguments, str(whole.get("model_type")) if text else "", whole, neutral)


def chosen_family_notes(family: Family, config: Mapping[str, Any]) -> list[str]:
    """Return a note if the user has chosen a family for a `model_type` that it does not name."""
    kind = str(config.get("model_type"))
    if kind == family.model_type:
        return []
    return [
        f"read as {family.name} by choice: names and shapes of {kind} were compared, not what it computes with them "
        "(order of rotary embeddings, norms, activations, scales); compare its logits"
    ]


def mismatch(family: Family, model: ModelArguments, trained: JobArguments, folder: Path) -> CheckpointError | None:
    """Check that a job may have trained the weights of a folder.

    Args:
        family: the family of the folder's model.
        model: the folder's model.
        trained: the arguments of the job.
        folder: the folder.

    Returns:
        The error to raise; None if nothing contradicts it.
    """
    tokens = int(model.require("vocab_size"))
    if (rows := trained.padded_vocab_size or 0) > tokens:
        return UnsupportedCheckpointError(
            "the job of the optimizer padded its vocabulary, and a Hugging Face folder has no such rows",
            found=f"{quantity(rows, 'row')}, of which {rows - tokens} are padding",
            where=str(folder),
            hint="pass a Megatron checkpoint with the weights of that step: --weights RUN",
        )
    if differences := contradictions(family, model, trained) if trained.is_complete else []:
        return ModelMismatchError(
            "the job of the optimizer trained another model than config.json describes, though the weights may fit",
            found="; ".join(differences),
            where=str(folder / CONFIG),
            hint="pass the folder of the model that was trained, or correct its config.json",
        )
    return None


def common_state(model: ModelArguments, vocabulary: int, dtypes: Sequence[str]) -> dict[str, Any]:
    """Return the common state of a release checkpoint with this model, as Megatron would write it.

    Args:
        model: the model.
        vocabulary: tokens without padding.
        dtypes: the dtypes of its tensors, the most frequent one first.
    """
    arguments = {
        **model.as_dict(),
        "padded_vocab_size": -(-vocabulary // _PADDING) * _PADDING,
        "make_vocab_size_divisible_by": _PADDING,
        "seq_length": model.max_position_embeddings,
        "norm_epsilon": model.layernorm_epsilon,
        "apply_layernorm_1p": model.layernorm_zero_centered_gamma,
        # True for all kinds of positions; compared on loading (`check_checkpoint_args`).
        "add_position_embedding": True,
        "moe_grouped_gemm": bool(model.num_experts and model.transformer_impl == TRANSFORMER_ENGINE),
        "bf16": "bfloat16" in dtypes,
        "fp16": "float16" in dtypes and "bfloat16" not in dtypes,
        "params_dtype": dtype_named(dtypes[0]),
        "tokenizer_type": "HuggingFaceTokenizer",
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        **{f"{name}_parallel_size": 1 for name in ("tensor_model", "pipeline_model", "expert_model", "context")},
        **{f"{name}_parallel_size": 1 for name in ("expert_tensor", "data")},
        "virtual_pipeline_model_parallel_size": None,
        "transformer_pipeline_model_parallel_size": 1,
        "world_size": 1,
    }
    return {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
    }
