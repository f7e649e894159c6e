"""Which folder a load takes, before Megatron itself has looked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.job.releases import FREEZES_WHOLE_JOBS
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.storage.checkpoint_dirs import TRACKER_FILE, iteration_folder, iteration_name, read_tracker

_NON_PERSISTENT = "non_persistent"


def run_folder(scope: Mapping[str, Any], arguments: Any, load_arg: str) -> tuple[str | None, bool]:
    """The run folder that a load takes, and whether it then counts as a fine-tuning: weights alone are taken.

    `--pretrained-checkpoint` counts where `--load` has no tracker, and means `--finetune` (`load_checkpoint`,
    megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2); so does `--freeze-all-layers` (development head of
    August 2026).

    Args:
        scope: the globals of Megatron's checkpointing module.
        arguments: Megatron's.
        load_arg: the name of the one that says what is loaded.
    """
    directory, pretrained = getattr(arguments, load_arg), getattr(arguments, "pretrained_checkpoint", None)
    exists = scope["checkpoint_exists"]
    if pretrained is not None and not exists(directory) and exists(pretrained):
        return pretrained, True
    return directory, trains_nothing(arguments)


def trains_nothing(arguments: Any) -> bool:
    """Whether the job neither loads an optimizer nor saves weights, but only its place in the data."""
    return bool(getattr(arguments, "freeze_all_layers", False)) and FREEZES_WHOLE_JOBS.is_of(megatron_version())


def folder_named(directory: str | None, arguments: Any) -> Path | None:
    """The iteration folder that Megatron would load from a run folder; None where that is its own business."""
    if not directory:
        return None
    run, step = Path(directory), getattr(arguments, "ckpt_step", None)
    try:
        if takes_another_kind(directory, arguments):
            return None
        if not step and not (run / TRACKER_FILE).exists():
            return None
        return run / iteration_name(int(step)) if step else iteration_folder(run)
    except (CheckpointError, OSError):  # whatever it is, stock Megatron will say so
        return None


def takes_another_kind(directory: str, arguments: Any) -> bool:
    """Whether a load takes a non-persistent checkpoint, or may take one.

    One that is not older than what is to be loaded otherwise (`_load_base_checkpoint`, core_v0.8.0 to 0.19.2). Of local
    ones only their manager knows.
    """
    kind = getattr(arguments, "non_persistent_ckpt_type", None)
    if kind != "global":
        return kind is not None
    place = getattr(arguments, "non_persistent_global_ckpt_dir", None) or Path(directory) / _NON_PERSISTENT
    found, own = (read_tracker(Path(folder) / TRACKER_FILE) for folder in (place, directory))
    if found is None or found.iteration is None:
        return found is not None  # what it says, Megatron will tell
    wanted = getattr(arguments, "ckpt_step", None) or (own.iteration if own else None)
    return wanted is None or found.iteration >= wanted
