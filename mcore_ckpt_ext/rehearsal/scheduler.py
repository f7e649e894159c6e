"""The check of Megatron's learning rate scheduler for a resuming job's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt_ext.job.job_arguments import JobArguments

_COMPARED = {
    "lr": ("max_lr", "learning rate"),
    "min_lr": ("min_lr", "minimum learning rate"),
    "lr_decay_style": ("lr_decay_style", "learning rate decay style"),
}


def scheduler_refusal(stored: Mapping[str, Any], running: JobArguments) -> str | None:
    """Return why the scheduler refuses its stored state; None if it accepts it.

    Source: `OptimizerParamScheduler._check_and_set` (megatron/core/optimizer_param_scheduler.py, core_v0.7.0 to 0.19.2
    and the development head of August 2026).

    Args:
        stored: its state in the checkpoint.
        running: the arguments of the job.
    """
    if running.raw.get("override_opt_param_scheduler") or running.raw.get("use_checkpoint_opt_param_scheduler"):
        return None
    for name, (key, label) in _COMPARED.items():
        own = running.raw.get(name)
        if own is not None and key in stored and own != stored[key]:
            return (
                f"Megatron's scheduler refuses another {label}, {own} instead of {stored[key]}, without "
                "--override-opt_param-scheduler or --use-checkpoint-opt_param-scheduler"
            )
    return None
