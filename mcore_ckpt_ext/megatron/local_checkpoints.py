"""Local non-persistent checkpoints, of which each rank keeps its own part on its node.

A manager of nvidia-resiliency-ext finds the newest iteration that all ranks of the job have, and each rank reads the
file with its own number (`LocalCheckpointManager`, checkpointing/local/ckpt_managers, 0.4 to 0.7). What is in the file
is never compared with the request before it is inserted (`MCoreTensorAwareStateDict.to_state_dict`,
megatron/core/dist_checkpointing/tensor_aware_state_dict.py, core_v0.10.0 to 0.19.2 and head: "TODO validate").
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt_ext.errors import ResumeRefusedError, quantity
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.overrides import Scope
from mcore_ckpt_ext.storage.checkpoint_dirs import TRACKER_FILE, read_tracker

LOCAL = "local"
_MANAGER = "local_checkpoint_manager"


def may_be_local(arguments: Any) -> bool:
    """Return True if a load takes a local checkpoint, if there is a newer one."""
    return getattr(arguments, "non_persistent_ckpt_type", None) == LOCAL


def takes_local_checkpoint(scope: Scope, call: Mapping[str, Any], directory: str | None) -> bool:
    """Return True if a load takes a local checkpoint, once its layout is that of the job. Collective.

    Raises:
        ResumeRefusedError: a job of another layout saved the local checkpoint.
    """
    arguments = scope["get_args"]()
    context = call.get("checkpointing_context")
    try:
        common, name, _, kind = scope["_load_base_checkpoint"](
            directory, arguments, rank0=True, checkpointing_context=context
        )
    except (Exception, CheckpointException):  # noqa: BLE001 - stock Megatron meets it again and reports it
        return False
    persistent = _persistent_iteration(arguments, directory)
    if getattr(kind, "name", None) != "LOCAL":
        _report_unused(context, persistent)
        return False
    if common is not None and "args" in common:
        _check_layout(vars(common["args"]), vars(arguments), name, persistent)
    return True


def _check_layout(written: Mapping[str, Any], running: Mapping[str, Any], name: Any, persistent: int | None) -> None:
    layouts = [ParallelLayout.from_arguments(JobArguments.of(arguments)) for arguments in (written, running)]
    if layouts[0] == layouts[1]:
        return
    number, rank, *_ = name
    way_out = "" if persistent is None else f", or leave out --non-persistent-ckpt-type: iteration {persistent} follows"
    raise ResumeRefusedError(
        "the newest checkpoint is a local one of another parallel layout, and local checkpoints cannot be resharded",
        found=f"iteration {number} of a job with {layouts[0]}",
        expected=str(layouts[1]),
        where=f"--non-persistent-local-ckpt-dir, rank {rank}",
        hint=f"start the job with the layout that saved it{way_out}",
    )


def _report_unused(context: Any, persistent: int | None) -> None:
    """Report newer local checkpoints that the manager does not take, because not all ranks have them."""
    manager = (context or {}).get(_MANAGER)
    available = getattr(manager, "globally_available_ids", None) or []
    numbers = [number for ids in available for number, *_ in ids]
    newest = max(numbers, default=-1)
    if newest <= (-1 if persistent is None else persistent):
        return
    holders = sum(any(number == newest for number, *_ in ids) for ids in available)
    instead = "the job starts without a checkpoint" if persistent is None else f"iteration {persistent} is loaded"
    ranks = f"of {quantity(len(available), 'rank')}"
    parts = quantity(holders, f"{ranks} has its part of it", f"{ranks} have their part of it")
    announce(
        f"the local checkpoint of iteration {newest} cannot be used: only {parts}, and it cannot be resharded; "
        f"{instead}"
    )


def _persistent_iteration(arguments: Any, directory: str | None) -> int | None:
    """Return the iteration that is loaded without local checkpoints; None if there is none."""
    if step := getattr(arguments, "ckpt_step", None):
        return int(step)
    tracker = read_tracker(Path(directory) / TRACKER_FILE) if directory else None
    return None if tracker is None else tracker.iteration
