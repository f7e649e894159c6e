"""Wraps Megatron's functions for saving: calls go to the coordinator of this job's saves.

The functions are `save_checkpoint`, `schedule_async_save`, `maybe_finalize_async_save` (megatron/training) and
`save_state_dict_async_finalize` (megatron/core/dist_checkpointing/strategies/state_dict_saver.py, and for the strategy
`nvrx` nvidia_resiliency_ext/checkpointing/async_ckpt/state_dict_saver.py); read in core_v0.7.0, 0.12.3, 0.16.1, 0.19.0
and 0.19.2, and in nvidia-resiliency-ext 0.6.0.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.formats.torch_dist.reader import NAME as TORCH_DIST
from mcore_ckpt_ext.megatron.energon_states import restore_argument
from mcore_ckpt_ext.megatron.huggingface_export import Exports
from mcore_ckpt_ext.megatron.live.sidecar_writer import packing_recorder
from mcore_ckpt_ext.megatron.run_folder import trains_nothing
from mcore_ckpt_ext.megatron.saving.atomic_write import Disk
from mcore_ckpt_ext.megatron.saving.coordinator import Coordinator
from mcore_ckpt_ext.megatron.saving.publisher import Publisher
from mcore_ckpt_ext.megatron.saving.ranks import JobRanks
from mcore_ckpt_ext.megatron.saving.save import Save
from mcore_ckpt_ext.megatron.saving.strategies import MegatronWriters, ResiliencyWriters
from mcore_ckpt_ext.megatron.saving.validation import collecting_index_problems, problems_on_disk, stored_bytes
from mcore_ckpt_ext.patching.log import announce
from mcore_ckpt_ext.patching.overrides import Scope, overridden, scope_of
from mcore_ckpt_ext.patching.patch_point import Function
from mcore_ckpt_ext.patching.reentrancy import reentrancy_guard
from mcore_ckpt_ext.patching.singletons import PROCESS
from mcore_ckpt_ext.settings import CONTINUE, ON_SAVE_FAILURE


def wrap_save_checkpoint(original: Function) -> Function:
    """Wrap `save_checkpoint`: a torch_dist checkpoint is either complete or absent, and has a sidecar."""
    scope = scope_of(original)

    @functools.wraps(original)
    def save_checkpoint(*positional: Any, **keywords: Any) -> Any:
        restore_argument(scope["get_args"]())
        call = inspect.signature(original).bind(*positional, **keywords)
        call.apply_defaults()
        if not _is_served(scope, call.arguments):
            return original(*positional, **keywords)
        save = _save_of(scope, call.arguments)

        def stock(redirected: bool) -> Any:
            elsewhere = overridden(scope, get_checkpoint_tracker_filename=lambda *_, **__: str(save.scratch))
            try:
                with reentrancy_guard(), elsewhere if redirected else nullcontext():
                    return original(*positional, **keywords)
            finally:
                save.sidecar.share()

        # A synchronous save may delete an older one as soon as it has written the tracker, which must be the real one
        # then.
        deletes = getattr(scope["get_args"](), "save_retain_interval", None) is not None
        return _coordinator().run(save, stock, must_track=deletes)

    return save_checkpoint


def wrap_schedule_async_save(original: Function) -> Function:
    """Wrap `schedule_async_save`: watch the writer, and finalize so that no rank is left waiting."""

    @functools.wraps(original)
    def schedule_async_save(async_request: Any, *positional: Any, **keywords: Any) -> Any:
        def stock(request: Any) -> Any:
            return original(request, *positional, **keywords)

        return _coordinator().schedule(async_request, _writers(original, async_request), stock)

    return schedule_async_save


def wrap_maybe_finalize_async_save(original: Function) -> Function:
    """Wrap `maybe_finalize_async_save`: never wait for a dead writer, and handle a failed save."""
    signature = inspect.signature(original)  # computed once: training calls the function at every step

    @functools.wraps(original)
    def maybe_finalize_async_save(*positional: Any, **keywords: Any) -> Any:
        call = signature.bind(*positional, **keywords)
        call.apply_defaults()
        stock = functools.partial(original, *positional, **keywords)
        if not call.arguments["blocking"]:
            return _coordinator().poll(_writers(original), stock)
        poll = functools.partial(original, blocking=False)
        return _coordinator().drain(_writers(original), poll, stock, ending=bool(call.arguments.get("terminate")))

    return maybe_finalize_async_save


def wrap_save_state_dict_async_finalize(original: Function) -> Function:
    """Wrap the step that writes the index: rank 0's errors reach all ranks, and every file is checked."""

    @functools.wraps(original)
    def save_state_dict_async_finalize(storage_writer: Any, *positional: Any, **keywords: Any) -> Any:
        def write(save: Save | None, problems: list[str]) -> Any:
            with collecting_index_problems(storage_writer, functools.partial(_inspect_disk, save), problems):
                return original(storage_writer, *positional, **keywords)

        return _coordinator().write_index(write)

    return save_state_dict_async_finalize


def _inspect_disk(save: Save | None, metadata: Any) -> list[str]:
    """Return the problems on disk of the active save, by its index, and record the size of its records."""
    if save is None:
        return []
    save.bytes = stored_bytes(metadata)
    return list(problems_on_disk(metadata, save.folder))


def _coordinator() -> Coordinator:
    return PROCESS.one(Coordinator, _new_coordinator)


def _new_coordinator() -> Coordinator:
    start = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publishing").submit
    publisher = Publisher(Disk(), start, time.monotonic, announce, _warn, _export)
    return Coordinator(JobRanks(), publisher, announce, _goes_on)


def _export(save: Save) -> None:
    PROCESS.one(Exports, _new_exports).follow(save, _arguments())


def _new_exports() -> Exports:
    start = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exporting").submit
    return Exports(start, announce, _warn)


def _writers(original: Function, request: object = None) -> MegatronWriters:
    """Return the writers of the job's strategy, which the request shows, or else the queue."""
    scope = scope_of(original)
    modules = [type(item).__module__ for item in (request, scope.get("_async_calls_queue"))]
    is_other = any(module.startswith("nvidia_resiliency_ext.") for module in modules)
    kind = ResiliencyWriters if is_other else MegatronWriters
    return PROCESS.one(kind, lambda: kind(scope, _warn))


def _warn(line: str) -> None:
    announce(line, every_rank=True)


def _goes_on() -> bool:
    """Return True if training continues when a save fails, by argument or environment; stock stops."""
    return ON_SAVE_FAILURE.choose(_arguments()) == CONTINUE


def _arguments() -> Any:
    """Return Megatron's arguments, as its own saves find them."""
    scope = vars(sys.modules["megatron.training.checkpointing"])
    return scope["get_args"]()


def _is_served(scope: Scope, call: Mapping[str, Any]) -> bool:
    """Return True if a save writes a persistent torch_dist checkpoint with weights to a local path."""
    arguments = scope["get_args"]()
    if trains_nothing(arguments):
        return False
    folder = str(arguments.save or "://")
    is_persistent = not call.get("non_persistent_ckpt", False)
    return getattr(arguments, "ckpt_format", None) == TORCH_DIST and is_persistent and "://" not in folder


def _finish_writing(folder: Path) -> None:
    """Wait for the writers of an earlier save to the same folder, whose files would be replaced.

    Megatron saves an iteration twice if its regular save is followed by a new step of the batch size's schedule
    (`train`, megatron/training/training.py, core_v0.7.0 to the development head of August 2026).
    """
    finalize = getattr(sys.modules.get("megatron.training.async_utils"), "maybe_finalize_async_save", None)
    if finalize is not None and _coordinator().is_writing(folder):
        finalize(blocking=True)


def _save_of(scope: Scope, call: Mapping[str, Any]) -> Save:
    arguments = scope["get_args"]()
    iteration = int(call["iteration"])
    release = bool(call.get("release", False))
    folder = Path(scope["get_checkpoint_name"](arguments.save, iteration, release=release, return_base_dir=True))
    _finish_writing(folder)
    is_recorded = getattr(arguments, "use_distributed_optimizer", False) and not arguments.no_save_optim
    optimizer = call["optimizer"] if is_recorded else None
    chunks = functools.partial(scope["unwrap_model"], call["model"])
    asynchronous = bool(getattr(arguments, "async_save", False))
    return Save(
        iteration=iteration,
        folder=folder,
        tracker=Path(scope["get_checkpoint_tracker_filename"](arguments.save)),
        tracker_text="release" if release else str(iteration),
        asynchronous=asynchronous,
        sidecar=packing_recorder().begin(chunks, optimizer, vars(arguments), iteration, in_background=asynchronous),
    )
