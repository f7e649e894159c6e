"""A checkpoint view of a model with its adapters merged into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError, join_some, quantity
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.passed_arguments import replaced_values
from mcore_ckpt_ext.families.recognition import Fit
from mcore_ckpt_ext.formats.adapter_only import adapters_in, fit_of_adapters
from mcore_ckpt_ext.formats.adapter_order import about_norms
from mcore_ckpt_ext.formats.adapter_scaling import Scaling
from mcore_ckpt_ext.formats.low_rank import Merged, Part, parts_of
from mcore_ckpt_ext.formats.parts import Weights, lazy
from mcore_ckpt_ext.formats.unread_state import UnreadState
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.formats.views import without_optimizer
from mcore_ckpt_ext.formats.weights_view import WeightsView, view_of_weights, with_file_names
from mcore_ckpt_ext.model_space.adapters import is_adapter
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.planning.plan import Derivation, derivation_of
from mcore_ckpt_ext.storage.overlay_reader import OverlayReader
from mcore_ckpt_ext.transfer import Transfer

Value = TypeVar("Value")


def _merged_weights(weights: Weights, merged: Mapping[str, Merged]) -> WeightsView:
    """Return the model's arrays without adapters.

    `_merge_derivations` derives the weights that adapters apply to.
    """

    def derivation(kind: str, name: str) -> Derivation | None:
        merged_weight = merged.get(name) if kind == WEIGHT else None
        return merged_weight if merged_weight is not None else derivation_of(weights, kind, name)

    return replace(
        view_of_weights(weights),
        names=lambda: [name for name in weights.names() if not is_adapter(name)],
        derivation=derivation,
    )


def merged_view(
    base: CheckpointView, adapters: CheckpointView, scaling: Scaling, family: Family | None, passed: Mapping[str, Any]
) -> CheckpointView:
    """Merge adapters into the weights of a base.

    The adapters are in the same or another checkpoint; the result has no optimizer.

    Args:
        base: the model.
        adapters: the checkpoint that contains the adapters.
        scaling: the scaling of the adapters.
        family: the family of the base that the user names.
        passed: arguments of the base that the user passes.

    Raises:
        UsageError: the two do not belong together.
        UnsupportedCheckpointError: the weight that an adapter belongs to is unknown.
    """
    are_together = base.files.folder.resolve() == adapters.files.folder.resolve()
    if not are_together:
        _check_separate_folders(base, adapters)
    view = without_optimizer(base)
    where = adapters.model.weights()
    if not are_together:
        reader = OverlayReader(base.files.reader, adapters.files.reader)
        where = with_file_names(where, reader.name_of)
        view = replace(view, files=replace(view.files, reader=reader, transfer=Transfer(reader)))
    merged = _merge_derivations(base, adapters, where, scaling, fit_of_adapters(base, family, passed))
    sources = [base] if are_together else [base, adapters]

    def unread(*, objects: bool = True) -> list[UnreadState]:
        return [item for source in sources for item in source.files.unread(objects=objects)]

    notes = [
        *replaced_values(base.job.arguments(), passed),
        f"adapters are merged into {quantity(len(merged), 'weight')}, in fp32, and rounded once",
        *adapters.composition.merge_notes,
        *about_norms(adapters, "this is"),
    ]
    return replace(
        view,
        model=replace(
            view.model,
            weights=lazy(lambda: _merged_weights(base.model.weights(), merged)),
            sharded_keys=lazy(lambda: _base_values(base.model.sharded_keys())),
        ),
        states=replace(view.states, extra=lazy(lambda: _base_values(base.states.extra()))),
        files=replace(view.files, unread=unread),
        format=replace(view.format, notices=lambda seen: [*notes, *view.format.notices(seen)]),
        composition=replace(view.composition, merged_from=sources, merge_notes=notes),
    )


def _base_values(named: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in named.items() if not is_adapter(name)}


def _merge_derivations(
    base: CheckpointView, adapters: CheckpointView, where: Weights, scaling: Scaling, fit: Fit
) -> dict[str, Merged]:
    """Return the derivation of each weight with adapters.

    `where` has the adapters' arrays under combined file names.

    Raises:
        UnsupportedCheckpointError: a weight is missing, or has another shape than its adapter.
    """
    parts: dict[str, list[Part]] = {}
    for linear in adapters_in(adapters, fit).linears:
        for name, part in parts_of(linear, scaling.scaling_of_rank(linear.rank)):
            _check_shape(base, name, linear.base.regions[0].sizes[1])
            parts.setdefault(name, []).append(part)
    return {name: Merged(base.model.weights(), where, weight_parts) for name, weight_parts in parts.items()}


def _check_separate_folders(base: CheckpointView, adapters: CheckpointView) -> None:
    """Check the adapters and the base if they are in two folders.

    Raises:
        UsageError: the adapters are stored with a model, or the base has adapters of its own.
    """
    if not all(map(is_adapter, adapters.names(WEIGHT))):
        raise UsageError(
            "the adapters are stored with their own model",
            found=f"--merge {base.files.folder}",
            where=str(adapters.files.folder),
            hint=f"pass --merge {adapters.files.folder}",
        )
    if adapter_names := [name for name in base.names(WEIGHT) if is_adapter(name)]:
        raise UsageError(
            "the model to merge into has adapters of its own",
            found=join_some(adapter_names, 2),
            where=str(base.files.folder),
            hint="merge its own adapters first",
        )


def _check_shape(base: CheckpointView, name: str, columns: int) -> None:
    tensor = base.logical_tensor(WEIGHT, name)
    if tensor is None or len(tensor.shape) != 2 or tensor.shape[1] != columns:
        raise UnsupportedCheckpointError(
            "a weight is missing, or does not have the shape of its adapter",
            found=str(tensor.shape) if tensor else "no weight",
            expected=quantity(columns, "column"),
            where=f"{name} in {base.files.folder}",
            hint="pass the model that the adapters are for",
        )
