"""Views of a checkpoint: under other names, and without its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import ne

from mcore_ckpt_ext.formats.parts import lazy
from mcore_ckpt_ext.formats.renamed import NameMap, RenamedOrder, RenamedState, RenamedWeights
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.model_space.names import spelled_as_in
from mcore_ckpt_ext.model_space.tensors import WEIGHT


def renamed(view: CheckpointView, names: Mapping[str, str]) -> CheckpointView:
    """A checkpoint of which some names are others.

    Args:
        view: the checkpoint.
        names: what each of its names is to be.
    """
    known = NameMap(names)
    if not known:
        return view
    return replace(
        view,
        model=replace(
            view.model,
            source=lazy(lambda: RenamedWeights(view.weights, known)),
            sharded_keys=lazy(lambda: known.sharded_keys(view.sharded_keys())),
        ),
        trained=replace(
            view.trained, state=lazy(lambda: RenamedState(view.optimizer, known)), shows_registration=False
        ),
        job=replace(view.job, orders=lambda: [RenamedOrder(order, known) for order in view.job.orders()]),
    )


def without_optimizer(view: CheckpointView) -> CheckpointView:
    """A checkpoint as one of weights alone."""
    return replace(view, trained=replace(view.trained, format=lambda: None))


def spelled_as(view: CheckpointView, other: CheckpointView) -> CheckpointView:
    """A checkpoint under the names that another has, if the two differ in nothing but their layer spec's names."""
    known = set(other.names(WEIGHT))
    names = {name: spelled_as_in(known, name) for name in view.names(WEIGHT)}
    one_for_one = len(set(names.values())) == len(names)
    return renamed(view, names) if one_for_one and any(map(ne, names, names.values())) else view
