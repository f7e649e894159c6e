"""Checks that the scheduler of a running job accepts the learning rate schedule of a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mcore_ckpt_ext.errors import ModelMismatchError, shorten


def check_schedule(scheduler: Any, stored: Mapping[str, Any] | None, folder: Path) -> None:
    """Refuse a stored schedule that Megatron's scheduler would reject; nothing is changed.

    Unless one of two flags is given, Megatron asserts that both schedules are equal
    (`OptimizerParamScheduler.load_state_dict`, megatron/core/optimizer_param_scheduler.py, core_v0.7.0 to 0.19.2). It
    counts in samples: warm-up and decay given in iterations change with the global batch size.

    Args:
        scheduler: the live scheduler.
        stored: its state in the checkpoint.
        folder: the checkpoint's folder.

    Raises:
        ModelMismatchError: a value differs.
    """
    trial = copy.copy(scheduler)
    trial.optimizer = SimpleNamespace(param_groups=[])
    try:
        trial.load_state_dict(stored)
    except AssertionError as error:
        raise ModelMismatchError(
            "the schedule of the learning rate or weight decay differs from the checkpoint's",
            found=shorten(str(error)),
            expected="the same, unless a flag selects one of the two",
            where=str(folder),
            hint="--override-opt_param-scheduler uses the schedule of the command line, "
            "--use-checkpoint-opt_param-scheduler that of the checkpoint; schedules count samples, so a new "
            "--global-batch-size changes --lr-warmup-iters, --lr-decay-iters and --train-iters",
        ) from error
