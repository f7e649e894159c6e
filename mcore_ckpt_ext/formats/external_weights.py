"""Weights that are stored in another folder than their optimizer, which the user names.

verl stores models as Hugging Face files, and their optimizers as distributed checkpoints (`loops/verl.py`).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import PackingError, ProofError, UnsupportedCheckpointError, UsageError
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.model_arguments import MODEL_ARGUMENTS
from mcore_ckpt_ext.layout.local_parameters import newest_cuts
from mcore_ckpt_ext.layout.weight_spec import WeightSpec
from mcore_ckpt_ext.model_space.anatomy import WORD_EMBEDDINGS
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.planning.plan import named_tensor

NAME_THEM = "pass the folder of its weights, a Hugging Face folder or a checkpoint: --weights FOLDER"


def arguments_of_model(source: CheckpointView) -> dict[str, Any]:
    """Return the arguments of a checkpoint's model; its layout and job may differ from the optimizer's."""
    arguments = source.job.arguments()
    model_arguments = {name: arguments.value(name) for name in MODEL_ARGUMENTS if arguments.is_set(name)}
    embeddings = source.logical_tensor(WEIGHT, WORD_EMBEDDINGS)
    return {**model_arguments, "padded_vocab_size": embeddings.shape[0]} if embeddings is not None else model_arguments


def external_weights(source: CheckpointView, arguments: JobArguments) -> dict[str, WeightSpec]:
    """Return the weights of a checkpoint as a job with these arguments shards them.

    The shards follow the rules of Megatron's layers. A weight without a rule is assumed to be replicated; the master
    check verifies that later.
    """
    tensors = {name: named_tensor(source, WEIGHT, name) for name in source.names(WEIGHT)}
    cut_of = newest_cuts({name: tensor.shape for name, tensor in tensors.items()}, arguments)
    weights = {}
    for name, tensor in tensors.items():
        cut = None
        with contextlib.suppress(UnsupportedCheckpointError):
            cut = cut_of(name)
        weights[name] = WeightSpec(tensor, cut.axis, cut.bands) if cut else WeightSpec(tensor, None)
    return weights


def check_external_weights(source: CheckpointView, checkpoint: CheckpointView) -> None:
    """Refuse weights that are not needed, a folder without weights, and one of another model.

    Raises:
        UsageError: the weights are not needed, or the folder has none.
        UnsupportedCheckpointError: the folder cannot contain all weights of the optimizer.
        ModelMismatchError: the optimizer's job trained another model than the folder describes.
    """
    if checkpoint.names(WEIGHT) or checkpoint.optimizer.format() is None:
        raise UsageError(
            "--weights applies only to an optimizer that is stored without weights",
            found="a checkpoint with its own weights" if checkpoint.names(WEIGHT) else "no optimizer",
            where=str(checkpoint.files.folder),
            hint="leave --weights out",
        )
    if not source.names(WEIGHT):
        raise UsageError("the folder of --weights has no weights", where=str(source.files.folder), hint=NAME_THEM)
    if mismatch := source.model.mismatch_with(checkpoint.job.arguments()):
        raise mismatch


def check_belonging(checkpoint: CheckpointView, folder: Path) -> None:
    """Check that weights belong to the optimizer, by names, shapes and samples of flat buffers.

    Every element is verified later, when it is read.

    Raises:
        UnsupportedCheckpointError: nothing can verify that they belong together.
        ProofError: they do not belong together.
    """
    state = checkpoint.optimizer.state()
    try:
        for buffers in state.buffers:
            for group in buffers.groups.values():
                buffers.packing_of(group)
    except PackingError as error:
        raise other_weights_error(str(error), checkpoint, folder) from error
    for name in state.names():
        weight = checkpoint.logical_tensor(WEIGHT, name)
        master = state.logical_tensor(FP32_PARAM, name)
        is_weight = any(stored.extent.file.startswith(f"{folder}/") for stored in state.stored_slices(FP32_PARAM, name))
        if master is None or is_weight or checkpoint.optimizer.masters_are_derived(name):
            raise UnsupportedCheckpointError(
                "the weights of another folder cannot be verified against this optimizer",
                found=f"no master of {name} that is stored independently of its weight",
                where=str(checkpoint.files.folder),
                hint="resume a job from it, which relies on the live model; or save once with the weights",
            )
        if weight is None or weight.shape != master.shape:
            difference = f"{name}: {f'weight of {weight.shape}' if weight else 'no weight'}, master of {master.shape}"
            raise other_weights_error(difference, checkpoint, folder)


def other_weights_error(found: str, checkpoint: CheckpointView, folder: Path) -> ProofError:
    """Return the error for weights in a folder that do not belong to the optimizer of a checkpoint."""
    return ProofError(
        "the weights do not belong to this optimizer, or it was written under another layout",
        found=found,
        expected=f"the weights of {folder}, written under {checkpoint.job.layout}",
        where=str(checkpoint.files.folder),
        hint="pass the weights of the same step; if the job padded its vocabulary, from a Megatron checkpoint "
        "(a Hugging Face folder has no padding); if the layout is unknown, "
        "--source-tensor-model-parallel-size N and so on",
    )
