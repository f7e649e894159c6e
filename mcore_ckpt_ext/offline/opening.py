"""The source of a conversion: opened under the names that the target wants."""

from __future__ import annotations

import os

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.colossalai import ColossalAICheckpoint
from mcore_ckpt_ext.formats.huggingface import TRANSFORMER_ENGINE, HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.under_layer_spec import UnderLayerSpec
from mcore_ckpt_ext.loops.facts import NOTHING, Facts
from mcore_ckpt_ext.targets import HuggingFace, Legacy, Target, TorchDist


def open_source(
    path: str | os.PathLike[str], target: Target, family: Family | None, facts: Facts = NOTHING
) -> Checkpoint:
    """The source of a conversion, under the names that the target wants.

    Raises:
        UsageError: an option makes no sense for this source.
        CheckpointError: it cannot be read.
    """
    wanted = None if isinstance(target, HuggingFace) else target.transformer_impl
    checkpoint = open_checkpoint(path, family=family, transformer_impl=wanted or TRANSFORMER_ENGINE, facts=facts)
    from_hugging_face = isinstance(checkpoint, HuggingFaceCheckpoint)
    if isinstance(target, Legacy) and isinstance(checkpoint, HuggingFaceCheckpoint):
        # Which rank of a pipeline holds the layers that predict further tokens, no legacy file says.
        checkpoint = checkpoint.without_further_tokens() if checkpoint.predicts_further_tokens else checkpoint
    if wanted is not None and not from_hugging_face:
        checkpoint = _under_layer_spec(checkpoint, target, wanted)
    if family is not None and not from_hugging_face and not isinstance(target, HuggingFace):
        raise UsageError(
            "a model family is used only where a Hugging Face folder is read or written",
            found=f"--family {family.name}, from {checkpoint.format} to {target.name}", where=str(checkpoint.folder),
            helps="leave the option out",
        )  # fmt: skip
    return checkpoint


def _under_layer_spec(checkpoint: Checkpoint, target: Target, spec: str) -> Checkpoint:
    """A checkpoint of Megatron under the names of a layer spec, which may be its own.

    Raises:
        UsageError: the option makes no sense for this source or target.
        UnsupportedCheckpointError: the other spec has no such layers.
    """
    for_bridge = isinstance(target, TorchDist) and target.loop == "bridge"
    if for_bridge or isinstance(checkpoint, ColossalAICheckpoint):
        raise UsageError(
            "the layer spec is chosen for jobs of Megatron-LM, from checkpoints of Megatron or from Hugging Face",
            found=f"--transformer-impl {spec}, {'--for bridge' if for_bridge else f'a source in {checkpoint.format}'}",
            where=str(checkpoint.folder), helps="leave the option out",
        )  # fmt: skip
    return checkpoint if checkpoint.arguments.transformer_impl == spec else UnderLayerSpec(checkpoint, spec)
