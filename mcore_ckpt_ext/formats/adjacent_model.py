"""The model that a training loop describes by a Hugging Face folder next to its checkpoint.

verl writes `huggingface/` into the folder of a step (`loops/verl.py`). Its `config.json` states what
`transformer_config.json` lacks, which has no functions, such as the activation, and no field of `GPTModel`, such as the
kind and base of its positions. It is evidence only where it agrees with what the ranks themselves wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mcore_ckpt_ext.errors import CheckpointError, UnsupportedCheckpointError, shorten
from mcore_ckpt_ext.formats.auxiliary_files import CONFIG
from mcore_ckpt_ext.formats.description import COMPARED_SIZES, Description, folders_of_verl
from mcore_ckpt_ext.formats.parts import Weights
from mcore_ckpt_ext.job.loops.verl import MODEL
from mcore_ckpt_ext.job.model_arguments import ModelArguments, complete
from mcore_ckpt_ext.model_space.anatomy import VOCABULARY
from mcore_ckpt_ext.model_space.tensors import WEIGHT

_NAME = f"{MODEL}/{CONFIG}"
_SHOWN = 3


def adjacent_model_folder(folder: Path) -> Path | None:
    """Return the Hugging Face folder that describes the model of a checkpoint; None if there is none."""
    places = (step / MODEL for step in folders_of_verl(folder))
    return next((place for place in places if (place / CONFIG).is_file()), None)


def with_adjacent_model(description: Description, weights: Weights, folder: Path) -> Description:
    """Add the arguments of the model that a folder next to a checkpoint describes, if they agree.

    Args:
        description: from other files; it takes precedence.
        weights: the weights of the checkpoint, possibly none.
        folder: the folder of the checkpoint.
    """
    place = adjacent_model_folder(folder)
    if place is None:
        return description
    from mcore_ckpt_ext.formats.hugging_face.model import described_model  # all families take 0.1 s to import

    try:
        described = described_model(place).arguments
        merged = description.with_model(described.as_dict())
        differences = [*_other_sizes(description, described), *_other_shapes(weights, complete(merged.arguments))]
    except (CheckpointError, OSError) as error:
        return description.with_problem(f"{_NAME} is ignored: {shorten(str(error))}")
    if differences:
        return description.with_problem(f"{_NAME} is ignored: {'; '.join(differences[:_SHOWN])}")
    return merged


def _other_sizes(description: Description, described: ModelArguments) -> Iterator[str]:
    for name in COMPARED_SIZES:
        stated = description.arguments.value(name)
        size = described.get(name)
        if stated is not None and size != stated:
            yield f"{name} is {size}, but {description.source} has {stated}"


def _other_shapes(weights: Weights, model: ModelArguments) -> Iterator[str]:
    from mcore_ckpt_ext.families.parameter_shapes import parameter_shape

    for name in weights.names():
        tensor = weights.logical_tensor(WEIGHT, name)
        try:
            shape = parameter_shape(name, model)
        except UnsupportedCheckpointError:
            continue  # nothing to compare with
        is_padded = tensor is not None and name in VOCABULARY and tensor.shape[0] > shape[0]
        if tensor is not None and tensor.shape != shape and not is_padded:
            yield f"{name} is {tensor.shape}, not {shape}"
