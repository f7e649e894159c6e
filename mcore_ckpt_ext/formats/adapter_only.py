"""Checkpoints that contain adapters: the names of their tensors, and the model they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError, join_some
from mcore_ckpt_ext.families.passed_arguments import with_passed
from mcore_ckpt_ext.formats.target import Target
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.views import rename_tensors
from mcore_ckpt_ext.formats.vocabulary import vocabulary_rows
from mcore_ckpt_ext.job.model_arguments import complete
from mcore_ckpt_ext.model_space.adapters import is_adapter, is_swift_name, to_bridge_name
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.plan import named_tensor

if TYPE_CHECKING:
    from mcore_ckpt_ext.families.adapters import Adapters
    from mcore_ckpt_ext.families.family import Family
    from mcore_ckpt_ext.families.recognition import Fit


def has_adapters_alone(checkpoint: CheckpointView) -> bool:
    """Return whether a checkpoint contains adapters and no other weights."""
    names = checkpoint.names(WEIGHT)
    return bool(names) and all(map(is_adapter, names))


def adapters_on_model(checkpoint: CheckpointView, model: CheckpointView) -> CheckpointView:
    """Attach the model, stored in another folder, to a checkpoint that contains only adapters."""
    return replace(checkpoint, composition=replace(checkpoint.composition, base_model=model))


def with_bridge_names(checkpoint: CheckpointView) -> CheckpointView:
    """Rename ms-swift's adapters to Megatron-Bridge's names; return any other checkpoint unchanged."""
    names = checkpoint.names(WEIGHT)
    if not any(map(is_swift_name, names)):
        return checkpoint
    view = rename_tensors(checkpoint, {name: to_bridge_name(name) for name in names})
    return replace(view, composition=replace(view.composition, adapters_by_rank=True))


def check_names(checkpoint: CheckpointView, target: Target) -> None:
    """Refuse adapters that the target cannot hold, or whose names its training loop does not accept.

    Args:
        checkpoint: the source.
        target: the format to write.

    Raises:
        UnsupportedCheckpointError: the checkpoint contains such adapters.
    """
    adapter_names = [name for name in checkpoint.names(WEIGHT) if is_adapter(name)]
    if adapter_names and not target.holds_adapters:
        raise UnsupportedCheckpointError(
            f"adapters are not written as {target.name}",
            where=str(checkpoint.files.folder),
            hint="--to torch_dist for the loop that wrote them, --to hf for peft",
        )
    if target.is_for_bridge and any(map(is_swift_name, adapter_names)):
        raise UnsupportedCheckpointError(
            "adapters of ms-swift are not written for Megatron-Bridge",
            found=join_some(adapter_names, 2),
            where=str(checkpoint.files.folder),
            hint="convert in two steps: first with --to hf, then the PEFT folder with --to torch_dist --for bridge",
        )


def fit_of_adapters(checkpoint: CheckpointView, family: Family | None, passed: Mapping[str, Any]) -> Fit:
    """Find the family of a model with adapters, stored in the same folder as the adapters or in another.

    Args:
        checkpoint: the model's checkpoint, or a checkpoint that contains only adapters.
        family: the family that the user names.
        passed: arguments that the user passes.

    Raises:
        UnsupportedCheckpointError: no family fits, or several do.
        UsageError: arguments are passed for a model that is described completely, or are none of Megatron's.
    """
    if checkpoint.composition.base_model is not None:
        return fit_of_adapters(checkpoint.composition.base_model, family, passed)
    if (fit := checkpoint.model.fit()) is not None:
        if passed:
            raise UsageError(
                "the arguments of this model are those of its config.json",
                found=f"--argument {sorted(passed)[0]}",
                where=str(checkpoint.files.folder),
                hint="leave the option out",
            )
        return fit
    # All families are imported, which takes longer than to open most checkpoints.
    from mcore_ckpt_ext.families.recognition import family_of_megatron

    where = str(checkpoint.files.folder)
    model = complete(with_passed(checkpoint.job.arguments(), passed, where))
    # No adapter depends on the vocabulary size.
    model = model.replace(vocab_size=checkpoint.job.tokens or vocabulary_rows(checkpoint) or 1)
    others = [name for name in checkpoint.names(WEIGHT) if not is_adapter(name)]
    return family_of_megatron(model, others or None, family, None, where)


def adapters_in(checkpoint: CheckpointView, fit: Fit) -> Adapters:
    """Return the adapters of a checkpoint; `fit` is the family of their model.

    Raises:
        UnsupportedCheckpointError: the weight that an adapter belongs to is unknown.
    """
    from mcore_ckpt_ext.families.adapters import adapters_of

    adapter_names = [name for name in checkpoint.names(WEIGHT) if is_adapter(name)]
    shapes = {name: named_tensor(checkpoint, WEIGHT, name).shape for name in adapter_names}
    ranks = None if "tensor" in checkpoint.job.layout.unknown else checkpoint.job.layout.tensor
    return adapters_of(
        fit.family.tensors(fit.arguments), shapes, ranks, by_rank=checkpoint.composition.adapters_by_rank
    )
