"""Compares the metadata of two checkpoints, which does not count for equality."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.continuity.data_order import data_description
from mcore_ckpt_ext.errors import UnsupportedCheckpointError, format_value, quantity
from mcore_ckpt_ext.families.forward_pass import differing_arguments
from mcore_ckpt_ext.formats import adapter_scaling
from mcore_ckpt_ext.formats.common_state import scheduler_in
from mcore_ckpt_ext.formats.expert_states import content_of, scaling_of
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.model_arguments import complete
from mcore_ckpt_ext.model_space.adapters import is_adapter
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.storage.te_extra_state import UnknownStateError

_DIGITS = 8


@dataclass(frozen=True, slots=True)
class MetadataComparison:
    """A property of both checkpoints outside of their tensors; its values may be equal.

    Attributes:
        what: the property.
        a: its value in A, as text.
        b: its value in B, as text.
    """

    what: str
    a: str
    b: str


def compare_metadata(a: CheckpointView, b: CheckpointView) -> Iterator[MetadataComparison]:
    """Yield format, layout, iteration, step and learning rate, and other properties that differ."""
    yield MetadataComparison(
        "format",
        *(f"{checkpoint.format.name}, optimizer {checkpoint.optimizer.format() or 'none'}" for checkpoint in (a, b)),
    )
    yield MetadataComparison("layout", str(a.job.layout), str(b.job.layout))
    yield MetadataComparison("iteration", str(a.job.iteration()), str(b.job.iteration()))
    for key in ("step", "lr"):
        yield MetadataComparison(key, _group_values(a, key), _group_values(b, key))
    for key in ("weight_decay", "betas", "eps", "max_lr", "min_lr"):
        settings = _settings(a, key), _settings(b, key)
        if "none" not in settings and settings[0] != settings[1]:
            yield MetadataComparison(key, *settings)
    for label, key in (("scheduled samples", "num_steps"), ("consumed samples", "consumed_train_samples")):
        counts = _count_samples(a, key), _count_samples(b, key)
        if "none" not in counts and counts[0] != counts[1]:
            yield MetadataComparison(label, *counts)
    read = [data_description(checkpoint.job.arguments()) for checkpoint in (a, b)]
    for label in sorted(read[0].keys() & read[1].keys() - {"consumed"}):
        if read[0][label] != read[1][label]:
            yield MetadataComparison(f"data: {label}", read[0][label], read[1][label])
    yield from _models(a, b)
    for label, describe, empty in (
        ("adapters multiplied by", _adapter_scaling, "none"),
        ("fp8 scales, histories", _scaling, "none"),
    ):
        values = describe(a), describe(b)
        if any(values):
            yield MetadataComparison(label, *(value or empty for value in values))


def _models(a: CheckpointView, b: CheckpointView) -> Iterator[MetadataComparison]:
    """Yield model arguments that differ, so that equal tensors compute different results."""
    with suppress(UnsupportedCheckpointError):  # a checkpoint need not describe its model completely
        models = complete(a.job.arguments()), complete(b.job.arguments())
        for name, values in differing_arguments(*models).items():
            yield MetadataComparison(name, *map(format_value, values))


def _group_values(checkpoint: CheckpointView, key: str) -> str:
    """Return the distinct values of a number in the parameter groups."""
    groups: list[dict[str, Any]] = checkpoint.optimizer.param_groups()
    values = {float(group[key]) for group in groups if isinstance(group.get(key), (int, float))}
    texts = (f"{value:g}" if value.is_integer() else repr(value) for value in sorted(values))
    return ", ".join(dict.fromkeys(texts)) or "none"  # one NaN is not unlike another


def _settings(checkpoint: CheckpointView, key: str) -> str:
    """Return the distinct values of any setting of the parameter groups."""
    return (
        ", ".join(sorted({format_value(group[key]) for group in checkpoint.optimizer.param_groups() if key in group}))
        or "none"
    )


def _count_samples(checkpoint: CheckpointView, key: str) -> str:
    """Return the number of samples that the scheduler or the job has counted."""
    scheduler = scheduler_in(checkpoint.job.common())
    samples = scheduler.get(key) if isinstance(scheduler, dict) else None
    return format_value(checkpoint.job.args.get(key, "none") if samples is None else samples)


def _adapter_scaling(checkpoint: CheckpointView) -> str:
    """Return the scaling of adapters, which no tensor contains; empty without adapters."""
    if not any(map(is_adapter, checkpoint.names(WEIGHT))):
        return ""
    try:
        scaling = adapter_scaling.scaling_of(checkpoint, None)
    except UnsupportedCheckpointError:
        return "not known"
    return f"{scaling.alpha:g} / {'root of the ' if scaling.by_root else ''}rank"


def _scaling(checkpoint: CheckpointView) -> str:
    """Return the number of modules with fp8 scaling, and a digest of its values; empty without any."""
    count = 0
    digest = hashlib.sha256()
    for name, state in sorted(checkpoint.states.extra().items()):
        try:
            parts = [(part, values.numpy().tobytes()) for part, values in sorted(scaling_of(state).items())]
        except UnknownStateError:  # not of fp8: digest its bytes
            parts = [("", content_of(state) or b"")]
        for part, data in parts:
            digest.update(f"{name} {part} {len(data)};".encode())
            digest.update(data)
        count += bool(parts)
    return f"of {quantity(count, 'module')}, {digest.hexdigest()[:_DIGITS]}" if count else ""
