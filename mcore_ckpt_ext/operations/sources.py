"""Opens the source of a conversion under the names of its target, and both sides of a comparison."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError
from mcore_ckpt_ext.formats.adapter_only import with_bridge_names
from mcore_ckpt_ext.formats.adapter_scaling import scaling_of
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.external_weights import NAME_THEM
from mcore_ckpt_ext.formats.registry import is_adapter_folder
from mcore_ckpt_ext.formats.under_layer_spec import under_layer_spec
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.views import with_first_moments
from mcore_ckpt_ext.job.assignments import parse_assignments
from mcore_ckpt_ext.job.facts import NOTHING, Facts
from mcore_ckpt_ext.model_space.adapters import is_adapter
from mcore_ckpt_ext.model_space.names import LayerSpec
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.targets import Target

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.family import Family

# The families, and what depends on them, are imported where a model folder needs them: that takes 0.1 s.


def open_source(
    path: str | os.PathLike[str],
    target: Target,
    family: Family | None,
    facts: Facts = NOTHING,
    weights: str | os.PathLike[str] | None = None,
    merge: str | os.PathLike[str] | None = None,
    index: FolderIndex | None = None,
) -> CheckpointView:
    """Open the source of a conversion, under the names that the target needs.

    `index`: that of the iteration folder, if it has been used before.

    Raises:
        UsageError: an option is invalid for this source.
        CheckpointError: the source cannot be read.
    """
    requested_spec = target.transformer_impl
    spec = requested_spec or LayerSpec.TRANSFORMER_ENGINE.value
    if merge is not None and is_adapter_folder(path):
        if weights is not None:
            raise UsageError(
                "the model of a PEFT folder is given twice",
                found=f"--merge {merge}, --weights {weights}",
                expected="one model",
                where=str(path),
                hint="leave --weights out",
            )
        weights = merge
    checkpoint = open_checkpoint(path, family=family, transformer_impl=spec, facts=facts, weights=weights, index=index)
    require_weights(checkpoint)
    checkpoint = with_first_moments(checkpoint)
    if merge is not None or target.is_model_folder:
        checkpoint = with_bridge_names(checkpoint)
    if merge is not None:
        return _merge_adapters(checkpoint, target, family, merge)
    from_hugging_face = checkpoint.format.is_model_folder
    if not target.places_mtp:
        checkpoint = checkpoint.format.limit_to_legacy(checkpoint)
    if target.is_for_bridge or target.is_model_folder:
        from mcore_ckpt_ext.formats.hugging_face.vision import as_text_model, with_vision_tower

        checkpoint = with_vision_tower(checkpoint) if target.is_for_bridge else as_text_model(checkpoint)
    if requested_spec is not None and not from_hugging_face:
        checkpoint = _under_layer_spec(checkpoint, target, requested_spec)
    if family is not None and not (from_hugging_face or weights) and not target.is_model_folder:
        raise UsageError(
            "--family applies only if a Hugging Face folder is read or written",
            found=f"--family {family.name}, from {checkpoint.format.name} to {target.name}",
            where=str(checkpoint.files.folder),
            hint="leave the option out",
        )
    return checkpoint


def open_both(
    paths: Sequence[str | os.PathLike[str]], family: Family | None, facts: Facts, weights: str | os.PathLike[str] | None
) -> list[CheckpointView]:
    """Open two checkpoints to compare; facts and weights apply to the sides that lack them, else to both.

    A PEFT folder always lacks its model: then the weights are its model, and apply to no other side.

    Raises:
        CheckpointError: a checkpoint cannot be read, or has no weights.
    """
    peft = [weights is not None and is_adapter_folder(path) for path in paths]
    opened = [
        open_checkpoint(path, family=family, weights=weights if lies_elsewhere else None)
        for path, lies_elsewhere in zip(paths, peft, strict=True)
    ]
    if facts != NOTHING or weights is not None:
        described = [checkpoint.job.arguments().is_complete for checkpoint in opened]
        of_side = [NOTHING if is_complete and not all(described) else facts for is_complete in described]
        has_own = [bool(checkpoint.names(WEIGHT)) for checkpoint in opened]
        needed = [not has_weights or (all(has_own) and not any(peft)) for has_weights in has_own]
        given = [weights if is_needed else None for is_needed in map(any, zip(peft, needed, strict=True))]
        sides = zip(paths, of_side, given, strict=True)
        opened = [
            open_checkpoint(path, family=family, facts=facts_of_side, weights=where)
            for path, facts_of_side, where in sides
        ]
    for checkpoint in opened:
        require_weights(checkpoint)
    if not all(checkpoint.format.is_model_folder for checkpoint in opened):
        return opened
    from mcore_ckpt_ext.formats.hugging_face.vision import compared_whole

    return compared_whole(opened)


def require_weights(checkpoint: CheckpointView) -> None:
    """Refuse an optimizer without weights, since it cannot be verified.

    Raises:
        UnsupportedCheckpointError: the checkpoint holds only an optimizer.
    """
    if checkpoint.optimizer.format() and not checkpoint.names(WEIGHT):
        raise UnsupportedCheckpointError(
            "the checkpoint has an optimizer without weights, and cannot be verified without them",
            found=checkpoint.optimizer.format(),
            where=str(checkpoint.files.folder),
            hint=NAME_THEM,
        )


def _merge_adapters(
    checkpoint: CheckpointView, target: Target, family: Family | None, path: str | os.PathLike[str]
) -> CheckpointView:
    """Return a model with the adapters of a checkpoint merged into it.

    Raises:
        UsageError: model and adapters do not belong together, or the target does not support such a model.
    """
    if not any(map(is_adapter, checkpoint.names(WEIGHT))):
        raise UsageError(
            "the checkpoint has no adapters to merge",
            found="--merge",
            where=str(checkpoint.files.folder),
            hint="leave the option out",
        )
    base = open_checkpoint(path, family=family)
    if not target.is_model_folder and (base.format.is_model_folder or target.transformer_impl is not None):
        raise UsageError(
            "--merge writes a Hugging Face folder if it merges into one, and keeps the layer spec of a "
            "Megatron checkpoint",
            found=f"--merge {path} --to {target.name}",
            where=str(checkpoint.files.folder),
            hint="convert in two steps: first with --merge FOLDER --to hf, then the folder that this writes",
        )
    from mcore_ckpt_ext.formats.merged import merged_view

    scaling = scaling_of(checkpoint, target.lora_alpha)
    passed = parse_assignments(target.arguments)
    return merged_view(base, checkpoint, scaling, family, passed)


def _under_layer_spec(checkpoint: CheckpointView, target: Target, spec: str) -> CheckpointView:
    """Return a checkpoint of Megatron under the names of a layer spec, which may be its own.

    Raises:
        UsageError: the option is invalid for this source or target.
        UnsupportedCheckpointError: the other spec has no such layers.
    """
    if target.is_for_bridge:
        raise UsageError(
            "the layer spec can be chosen for jobs of Megatron-LM only",
            found=f"--transformer-impl {spec}, --for bridge",
            where=str(checkpoint.files.folder),
            hint="leave the option out",
        )
    return checkpoint if checkpoint.job.arguments().transformer_impl == spec else under_layer_spec(checkpoint, spec)
