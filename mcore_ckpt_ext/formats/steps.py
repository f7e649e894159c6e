"""Checks that all copies of the optimizer's step are equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_ckpt_ext.formats.portable_state import inner_state, several_steps
from mcore_ckpt_ext.formats.view import CheckpointView


def check_step(checkpoint: CheckpointView) -> None:
    """Refuse an optimizer whose step is stored with different values.

    All groups of all ranks and optimizers have the same step. torch's Adam, which keeps a step for each parameter,
    stores it a second time (`_synchronize_steps` and `_extract_common_per_param_step`,
    megatron/core/optimizer/optimizer.py, core_v0.12.0 to 0.19.2).

    Raises:
        UnreadableCheckpointError: the stored steps differ.
    """
    if checkpoint.optimizer.format() is None:
        return
    by_step: dict[float, str] = {}
    for where, step in _steps(checkpoint):
        by_step.setdefault(step, where)
    if len(by_step) > 1:
        raise several_steps(by_step, str(checkpoint.files.folder))


def _steps(checkpoint: CheckpointView) -> Iterator[tuple[str, float]]:
    for number, group in enumerate(checkpoint.optimizer.param_groups()):
        yield from _number(f"parameter group {number}", group)
    for number, child in enumerate(checkpoint.optimizer.chained_optimizer_settings()):
        yield from _number(f"the state of optimizer {number}", inner_state(child).get("state") or {}, "common_step")


def _number(where: str, settings: Mapping[str, Any], key: str = "step") -> Iterator[tuple[str, float]]:
    value = settings.get(key)
    if value is not None:
        yield where, float(value)
