"""Determines the folder that a load takes, before Megatron itself does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.job.releases import FREEZES_WHOLE_JOBS
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.patching.overrides import Scope
from mcore_ckpt_ext.storage.checkpoint_dirs import TRACKER_FILE, iteration_folder, iteration_name, newer_non_persistent


def run_folder(scope: Scope, arguments: Any, load_arg: str) -> tuple[str | None, bool]:
    """Return the run folder that a load takes, and True if it takes weights only, as by `--finetune`.

    `--pretrained-checkpoint` is used if `--load` has no tracker, and implies `--finetune` (`load_checkpoint`,
    megatron/training/checkpointing.py, core_v0.7.0 to 0.19.2); so does `--freeze-all-layers` (development head of
    August 2026). `load_arg` names the argument that holds the path to load from.
    """
    directory = getattr(arguments, load_arg)
    pretrained = getattr(arguments, "pretrained_checkpoint", None)
    exists = scope["checkpoint_exists"]
    if pretrained is not None and not exists(directory) and exists(pretrained):
        return pretrained, True
    return directory, trains_nothing(arguments)


def trains_nothing(arguments: Any) -> bool:
    """Return True if the job loads no optimizer and saves only its place in the data."""
    return bool(getattr(arguments, "freeze_all_layers", False)) and FREEZES_WHOLE_JOBS.is_of(megatron_version())


def folder_to_load(directory: str | None, arguments: Any) -> Path | None:
    """Return the iteration folder that Megatron would load from a run folder; None if undecided."""
    if not directory:
        return None
    run = Path(directory)
    step = getattr(arguments, "ckpt_step", None)
    try:
        if takes_non_persistent(directory, arguments):
            return None
        if not step and not (run / TRACKER_FILE).exists():
            return None
        return run / iteration_name(int(step)) if step else iteration_folder(run)
    except (CheckpointError, OSError):  # stock Megatron reports the error
        return None


def takes_non_persistent(directory: str, arguments: Any) -> bool:
    """Return True if a load takes a non-persistent checkpoint, or may take one.

    Only their manager can list local ones.
    """
    kind = getattr(arguments, "non_persistent_ckpt_type", None)
    if kind != "global":
        return kind is not None
    place = getattr(arguments, "non_persistent_global_ckpt_dir", None)
    step = getattr(arguments, "ckpt_step", None)
    return newer_non_persistent(Path(directory), Path(place) if place else None, step) is not None
