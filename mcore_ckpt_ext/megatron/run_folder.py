"""Determines the folder that a load takes, before Megatron itself does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.legacy.reader import NAME as LEGACY
from mcore_ckpt_ext.formats.torch_dist.reader import NAME as TORCH_DIST
from mcore_ckpt_ext.job.releases import FREEZES_WHOLE_JOBS
from mcore_ckpt_ext.megatron.running_version import megatron_version
from mcore_ckpt_ext.patching.overrides import Scope, overridden
from mcore_ckpt_ext.storage.checkpoint_dirs import (
    TRACKER_FILE,
    Tracker,
    iteration_folder,
    iteration_name,
    newer_non_persistent,
)
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE

_GLOBAL = "global"


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
    """Return the iteration folder that Megatron would load for a run folder; None if undecided."""
    try:
        if directory and takes_non_persistent(directory, arguments):
            tracker = _non_persistent(directory, arguments) if arguments.ckpt_format == TORCH_DIST else None
            return None if tracker is None or tracker.iteration is None else tracker.folder
    except (CheckpointError, OSError):  # stock Megatron reports the error
        return None
    return persistent_folder(directory, arguments)


def persistent_folder(directory: str | None, arguments: Any, step: int | None = None) -> Path | None:
    """Return the persistent iteration folder that Megatron would load; None if undecided.

    `step`: the iteration to load in place of the one that the arguments or the tracker name.
    """
    if not directory:
        return None
    run = Path(directory)
    step = step or getattr(arguments, "ckpt_step", None)
    try:
        if not step and not (run / TRACKER_FILE).exists():
            return None
        return run / iteration_name(int(step)) if step else iteration_folder(run)
    except (CheckpointError, OSError):  # stock Megatron reports the error
        return None


def detects_format(arguments: Any) -> bool:
    """Return True if a load takes a checkpoint in any format (`--auto-detect-ckpt-format`)."""
    return bool(getattr(arguments, "auto_detect_ckpt_format", False))


@contextmanager
def with_detected_format(directory: str | None, arguments: Any) -> Iterator[None]:
    """Within this scope, let a job that saves legacy files load a distributed checkpoint that it detects.

    `load_checkpoint` detects it, and still goes by `--ckpt-format`: it refuses another layout, and requests a state
    without a model (`check_checkpoint_args` and `generate_state_dict`, megatron/training/checkpointing.py, core_v0.16.1
    to 0.19.2 and the development head of August 2026).
    """
    folder = folder_to_load(directory, arguments) if detects_format(arguments) else None
    detected = {}
    if folder is not None and arguments.ckpt_format == LEGACY and (folder / METADATA_FILE).is_file():
        detected = {"ckpt_format": TORCH_DIST, "use_dist_ckpt": True}
    with overridden(vars(arguments), **detected):
        yield


def takes_non_persistent(directory: str, arguments: Any) -> bool:
    """Return True if a load takes a non-persistent checkpoint, or may take one.

    Only their manager can list local ones.
    """
    kind = getattr(arguments, "non_persistent_ckpt_type", None)
    try:
        return kind is not None and (kind != _GLOBAL or _non_persistent(directory, arguments) is not None)
    except OSError:  # stock Megatron reports the error
        return True


def _non_persistent(directory: str, arguments: Any) -> Tracker | None:
    """Return the tracker of the global non-persistent checkpoint that a load takes, if any."""
    if getattr(arguments, "non_persistent_ckpt_type", None) != _GLOBAL:
        return None
    place = getattr(arguments, "non_persistent_global_ckpt_dir", None)
    step = getattr(arguments, "ckpt_step", None)
    return newer_non_persistent(Path(directory), Path(place) if place else None, step)
