"""Determines if a checkpoint has to be presented to Megatron, which cannot read it, and why."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.formats.backend import is_finished
from mcore_ckpt_ext.formats.registry import format_of
from mcore_ckpt_ext.formats.torch_dist.reader import COMMON_FILE
from mcore_ckpt_ext.formats.torch_dist.reader import NAME as TORCH_DIST
from mcore_ckpt_ext.formats.zarr.reader import NAME as ZARR
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import STORES_COMMON_STATE_AS_OBJECT
from mcore_ckpt_ext.layout.parallel import placement_changes
from mcore_ckpt_ext.megatron.load_session import LoadSession
from mcore_ckpt_ext.megatron.run_folder import folder_to_load
from mcore_ckpt_ext.megatron.running_version import megatron_version

_DISTRIBUTED = "use_distributed_optimizer"


def may_need_presentation(
    session: LoadSession, arguments: Any, version: tuple[int, int], *, reads_zarr: Callable[[], bool]
) -> bool:
    """Return True if stock Megatron may be unable to load a checkpoint, by the traits of its format.

    Args:
        session: the folder to load.
        arguments: Megatron's arguments of the job that loads.
        version: the version of its Megatron Core.
        reads_zarr: returns True if it reads zarr.
    """
    stored = format_of(session.folder, session.index)
    if stored is None or stored.is_loaded_as_stored:
        return lacks_common_file(session.folder, version)
    return not reads_zarr() if stored.name == ZARR else stored.name != arguments.ckpt_format


def session_to_present(directory: str | None, arguments: Any, begun: LoadSession | None = None) -> LoadSession | None:
    """Return the load of the folder that Megatron would take, if stock may be unable to load it.

    `begun`: the load so far, which may be of this folder.
    """
    folder = folder_to_load(directory, arguments)
    session = None if folder is None else begun.with_folder(folder) if begun is not None else LoadSession(folder)
    if session is None or not may_need_presentation(session, arguments, megatron_version(), reads_zarr=reads_zarr):
        return None
    return session


def lacks_common_file(folder: Path, version: tuple[int, int]) -> bool:
    """Return True if the folder lacks `common.pt`, which Megatron of this version requires."""
    requires = not STORES_COMMON_STATE_AS_OBJECT.is_of(version)
    return requires and is_finished(folder, TORCH_DIST) and not (folder / COMMON_FILE).exists()


def reads_zarr() -> bool:
    """Return True if Megatron has its zarr strategy (until core_v0.16.0, faa6037b) and zarr is installed."""
    strategies = import_module("megatron.core.dist_checkpointing.strategies")
    return find_spec(f"{strategies.__name__}.zarr") is not None and find_spec("zarr") is not None


def reasons_to_present(session: LoadSession, arguments: Any, version: tuple[int, int]) -> list[str]:
    """Return the reasons why stock Megatron cannot load a checkpoint; empty if it can.

    For a legacy checkpoint: the arguments that differ from those of a checkpoint of the running layout.

    Args:
        session: the folder to load.
        arguments: Megatron's arguments of the job that loads.
        version: the version of its Megatron Core.

    Raises:
        CheckpointError: the checkpoint is unreadable.
    """
    checkpoint = session.checkpoint
    try:
        if not checkpoint.format.loading.by_rank:
            later = f", written by Megatron {STORES_COMMON_STATE_AS_OBJECT.since} or later"
            return [f"the format {checkpoint.format.name}{later if lacks_common_file(session.folder, version) else ''}"]
        changes = placement_changes(checkpoint.job.arguments(), JobArguments.of(vars(arguments)))
        # Without it the optimizer's state is in none of the files that the distributed optimizer would open.
        written = checkpoint.job.arguments().use_distributed_optimizer
        return changes if written or not getattr(arguments, _DISTRIBUTED, False) else [*changes, _DISTRIBUTED]
    finally:
        checkpoint.files.reader.close()
