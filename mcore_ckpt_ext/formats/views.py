"""Views of a checkpoint: renamed, without optimizer, or with the moments that precede the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import ne
from typing import Any

from mcore_ckpt_ext.formats.common_state import scheduler_in
from mcore_ckpt_ext.formats.parts import lazy
from mcore_ckpt_ext.formats.portable_state import inner_state
from mcore_ckpt_ext.formats.renamed import NameMap, RenamedOrder, renamed_state, renamed_weights
from mcore_ckpt_ext.formats.stacking import sharded_keys
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.layer_form import check_layer_form
from mcore_ckpt_ext.model_space.names import name_in
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.optimizers.first_step import (
    WITHOUT_STEP,
    counts_no_step,
    lack_first_moments,
    moments_of,
    with_step_zero,
    with_zero_moments,
)


def rename_tensors(view: CheckpointView, names: Mapping[str, str]) -> CheckpointView:
    """Return a view of a checkpoint with other names.

    Args:
        view: the checkpoint.
        names: the new name for each of its names.
    """
    name_map = NameMap(names)
    if not name_map:
        return view
    return replace(
        view,
        model=replace(
            view.model,
            weights=lazy(lambda: renamed_weights(view.model.weights(), name_map)),
            sharded_keys=lazy(lambda: name_map.sharded_keys(view.model.sharded_keys())),
        ),
        optimizer=replace(
            view.optimizer,
            state=lazy(lambda: renamed_state(view.optimizer.state(), name_map)),
            shows_registration=False,
        ),
        job=replace(
            view.job, observed_orders=lambda: [RenamedOrder(order, name_map) for order in view.job.observed_orders()]
        ),
    )


def with_layer_form(view: CheckpointView, changes: Mapping[str, Any]) -> CheckpointView:
    """Return a view of a checkpoint for a job whose arguments differ only in how layers are stored.

    Args:
        view: the checkpoint.
        changes: arguments of `LAYER_FORM`.

    Raises:
        UsageError: they describe another model.
    """
    if not changes:
        return view
    check_layer_form(view.job.arguments(), changes)
    arguments = view.job.arguments().replace(**changes)
    return replace(
        view,
        model=replace(view.model, sharded_keys=lazy(lambda: sharded_keys(view.model.weights().names(), arguments))),
        job=replace(view.job, arguments=lambda: arguments),
    )


def without_optimizer(view: CheckpointView) -> CheckpointView:
    """Return a view of a checkpoint without its optimizer."""
    return replace(view, optimizer=replace(view.optimizer, format=lambda: None))


def is_before_first_step(view: CheckpointView) -> bool:
    """Return whether the optimizer was saved before its first step, without moments.

    See `optimizers.first_step`.
    """
    if view.optimizer.format() is None or not counts_no_step(scheduler_in(view.job.common())):
        return False
    return lack_first_moments(view.optimizer.param_groups()) and set(view.optimizer.kinds()) == {FP32_PARAM}


def with_first_moments(view: CheckpointView) -> CheckpointView:
    """Add the moments and the step with which an optimizer starts its first step.

    Returns:
        The same checkpoint, unless its optimizer was saved before that step.
    """
    if not is_before_first_step(view):
        return view
    stored = view.optimizer
    state = stored.state()
    moments = moments_of(stored.param_groups())
    optimizer = replace(
        stored,
        state=lambda: with_zero_moments(state, moments),
        param_groups=lambda: with_step_zero(stored.param_groups()),
        chained_optimizer_settings=lambda: [_with_step_zero(child) for child in stored.chained_optimizer_settings()],
    )
    return replace(
        view,
        optimizer=optimizer,
        format=replace(view.format, notices=lambda seen: [*view.format.notices(seen), WITHOUT_STEP]),
    )


def _with_step_zero(child: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a chained optimizer with step 0 in its groups."""
    inner = inner_state(child)
    counted = {**inner, "param_groups": with_step_zero(inner["param_groups"])}
    return {**child, "optimizer": counted} if "optimizer" in child else counted


def with_names_of(view: CheckpointView, other: CheckpointView) -> CheckpointView:
    """Return a view under another checkpoint's names, if only the names of their layer specs differ."""
    other_names = set(other.names(WEIGHT))
    names = {name: name_in(other_names, name) for name in view.names(WEIGHT)}
    one_for_one = len(set(names.values())) == len(names)
    return rename_tensors(view, names) if one_for_one and any(map(ne, names, names.values())) else view
