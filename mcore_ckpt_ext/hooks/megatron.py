"""The seams in `megatron/training/checkpointing.py`: what runs around `load_checkpoint` and `save_checkpoint`.

Tried with core_v0.16.1, 0.19.0 and 0.19.2. A load that stock Megatron can do gets the very arguments it came with.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt_ext import __version__
from mcore_ckpt_ext.formats.bucket_formats import DP_RESHARDABLE
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.legacy import NAME as LEGACY
from mcore_ckpt_ext.formats.model_space_state import FULLY_RESHARDABLE
from mcore_ckpt_ext.formats.optimizer_encodings import FORMATS, stock_can_load
from mcore_ckpt_ext.formats.torch_dist import NAME as TORCH_DIST
from mcore_ckpt_ext.formats.torch_dist import common_optimizers, sharding_type
from mcore_ckpt_ext.hooks.announce import announce
from mcore_ckpt_ext.hooks.legacy_feed import changes_of, fed, folder_to_feed, load_weights_alone
from mcore_ckpt_ext.hooks.resuming import taking_what_is_whole
from mcore_ckpt_ext.hooks.saving import Save, run_save
from mcore_ckpt_ext.layout.parallel import placement_changes
from mcore_ckpt_ext.layout.sidecar import RecordedGroup, SaveRecord
from mcore_ckpt_ext.online.agreement import agreed, gather
from mcore_ckpt_ext.online.live_optimizer import distributed_optimizers, stock_stumbles
from mcore_ckpt_ext.online.record import merged, recorded_groups, sidecar_text
from mcore_ckpt_ext.optimizer_reshard import OptimizerReshard, unproven_names

Function = Callable[..., Any]

VERIFY_VARIABLE = "MCORE_CKPT_EXT_VERIFY"
LOST_VARIABLE = "MCORE_CKPT_EXT_ACCEPT_LOST"

# The groups of this job's sidecar, gathered at the first save of each optimizer.
_recorded: WeakKeyDictionary[Any, tuple[RecordedGroup, ...]] = WeakKeyDictionary()


def wrap_load_checkpoint(original: Function) -> Function:
    """Around `load_checkpoint`: resume the optimizer ourselves where stock would refuse or load other parameters."""

    @functools.wraps(original)
    def load_checkpoint(
        ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, *positional: Any, **keywords: Any
    ) -> Any:
        call = inspect.signature(original).bind(ddp_model, optimizer, opt_param_scheduler, *positional, **keywords)
        call.apply_defaults()
        scope = _scope(original)
        with taking_what_is_whole(scope, getattr(scope["get_args"](), call.arguments["load_arg"])):
            return load(call.arguments, ddp_model, optimizer, opt_param_scheduler, *positional, **keywords)

    def load(
        given: Mapping[str, Any],
        ddp_model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        *positional: Any,
        **keywords: Any,
    ) -> Any:
        stock = functools.partial(original, ddp_model, optimizer, opt_param_scheduler, *positional, **keywords)
        scope = _scope(original)
        arguments = scope["get_args"]()
        chunks, directory = scope["unwrap_model"](ddp_model), getattr(arguments, given["load_arg"])
        if not _resumes_distributed_optimizer(scope, optimizer):
            if optimizer is not None and not arguments.no_load_optim and not arguments.finetune:
                return stock()
            return load_weights_alone(scope, directory, chunks, stock)
        looks = agreed("looking at the checkpoint", lambda: _look(scope, given))
        look = next((found for found in looks if found is not None), None)
        if look is None:
            return load_weights_alone(scope, directory, chunks, stock)
        if look.stock_loads:
            result = stock()
            if look.optimizer_format == FULLY_RESHARDABLE:
                _prove_stock_load(look.folder, chunks, optimizer, arguments)
            return result
        reshard = OptimizerReshard(look.folder, chunks, optimizer, vars(arguments))
        reshard.prepare(verify_all=os.environ.get(VERIFY_VARIABLE) == "full", accept_lost=_accepts_lost())
        fresh = reshard.random_state_grid != _random_state_grid(arguments)
        feed = fed(scope, look.folder, chunks) if look.is_fed else nullcontext()
        with _overridden(arguments, no_load_optim=True, no_load_rng=fresh or arguments.no_load_rng), feed:
            result = original(ddp_model, None, None, *positional, **keywords)
        reshard.prove()
        summary = reshard.fill()
        if opt_param_scheduler is not None:
            common = reshard.common
            opt_param_scheduler.load_state_dict(common.get("lr_scheduler", common.get("opt_param_scheduler")))
        announce(f"{summary}{'; random state starts anew, as in stock Megatron on a changed layout' if fresh else ''}")
        return result

    return load_checkpoint


def wrap_save_checkpoint(original: Function) -> Function:
    """Around `save_checkpoint`: a torch_dist checkpoint is whole or not there, and has its sidecar."""

    @functools.wraps(original)
    def save_checkpoint(iteration: int, model: Any, optimizer: Any, *positional: Any, **keywords: Any) -> Any:
        stock = functools.partial(original, iteration, model, optimizer, *positional, **keywords)
        scope = _scope(original)
        call = inspect.signature(original).bind(iteration, model, optimizer, *positional, **keywords)
        call.apply_defaults()
        if not _is_served(scope, call.arguments):
            return stock()
        return run_save(scope, _save_of(scope, call.arguments), stock)

    return save_checkpoint


def _is_served(scope: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """A persistent torch_dist checkpoint in a folder of the file system."""
    arguments = scope["get_args"]()
    folder = str(arguments.save or "://")
    is_persistent = not call.get("non_persistent_ckpt", False)
    return getattr(arguments, "ckpt_format", None) == TORCH_DIST and is_persistent and "://" not in folder


def _save_of(scope: Mapping[str, Any], call: Mapping[str, Any]) -> Save:
    arguments, iteration, release = scope["get_args"](), int(call["iteration"]), bool(call.get("release", False))
    groups: tuple[RecordedGroup, ...] = ()
    if _saves_distributed_optimizer(scope, call):
        optimizer = call["optimizer"]
        if optimizer not in _recorded:
            _recorded[optimizer] = _gathered(scope["unwrap_model"](call["model"]), optimizer)
        groups = _recorded[optimizer]
    folder = Path(scope["get_checkpoint_name"](arguments.save, iteration, release=release, return_base_dir=True))
    return Save(
        iteration=iteration,
        folder=folder,
        tracker=Path(scope["get_checkpoint_tracker_filename"](arguments.save)),
        tracker_text="release" if release else str(iteration),
        asynchronous=bool(getattr(arguments, "async_save", False)),
        record=functools.partial(_record, groups, vars(arguments), iteration),
    )


def _scope(original: Function) -> Mapping[str, Any]:
    """The globals of Megatron's checkpointing module, below whatever else has wrapped its functions."""
    scope: Mapping[str, Any] = inspect.unwrap(original).__globals__
    return scope


def _resumes_distributed_optimizer(scope: Mapping[str, Any], optimizer: Any) -> bool:
    arguments = scope["get_args"]()
    return (
        optimizer is not None
        and getattr(arguments, "use_distributed_optimizer", False)
        and not arguments.no_load_optim
        and not arguments.finetune
        and (arguments.ckpt_format in (TORCH_DIST, LEGACY) or getattr(arguments, "auto_detect_ckpt_format", False))
        and distributed_optimizers(optimizer) is not None
    )


@dataclass(frozen=True)
class _Look:
    """What a first look at a checkpoint says: where it is, and whether Megatron itself loads its optimizer."""

    folder: Path
    optimizer_format: str | None
    changes: tuple[str, ...]
    stock_loads: bool
    is_fed: bool = False


def _look(scope: Mapping[str, Any], call: Mapping[str, Any]) -> _Look | None:
    """Look at the common state with Megatron's own reader, which knows of steps, trackers and non-persistent saves.

    Returns:
        None where there is no optimizer state for us to think about.
    """
    arguments = scope["get_args"]()
    directory = getattr(arguments, call["load_arg"])
    if folder := folder_to_feed(directory, arguments):
        if folder.name == "release":
            return None
        moved = tuple(changes_of(folder, arguments))
        return _Look(folder, None, moved, stock_loads=not moved, is_fed=True)
    if arguments.ckpt_format == LEGACY and not getattr(arguments, "auto_detect_ckpt_format", False):
        return None
    context = {key: call[key] for key in ("checkpointing_context",) if key in call}
    try:
        common, name, release, kind = scope["_load_base_checkpoint"](directory, arguments, rank0=True, **context)
    except (Exception, CheckpointException):
        # Megatron and torch tell what they missed, not what is wrong: our own reader names the file, and what helps.
        step = getattr(arguments, "ckpt_step", None)
        _ = open_checkpoint(Path(directory) / f"iter_{step:07d}" if step else Path(directory)).common
        raise
    if common is None or release or getattr(kind, "name", None) != "GLOBAL" or "args" not in common:
        return None
    written = vars(common["args"])
    optimizer_format = sharding_type(common)
    if written.get("no_save_optim") or optimizer_format not in FORMATS:
        return None
    changes = placement_changes(written, vars(arguments))
    stumbles = stock_stumbles(call["optimizer"], len(common_optimizers(common)), optimizer_format == DP_RESHARDABLE)
    stock_loads = stock_can_load(optimizer_format, bool(changes), _megatron_version()) and not stumbles
    return _Look(Path(name), optimizer_format, tuple(changes), stock_loads)


def _prove_stock_load(folder: Path, chunks: Any, optimizer: Any, arguments: Any) -> None:
    """Prove a `fully_reshardable` load by Megatron, and repair what Megatron wrote wrong (formats/shifted_state.py)."""
    found = agreed("proving what Megatron loaded", lambda: unproven_names(chunks, optimizer), "do not train on")
    names = {name for names in found for name in names}
    if names:
        reshard = OptimizerReshard(folder, chunks, optimizer, vars(arguments))
        reshard.prepare(accept_lost=_accepts_lost())
        reshard.prove()
        lost = f", {reshard.lost_elements} lost elements took their weights, with zero moments"
        repaired = f"{len(names)} parameters of this checkpoint were written shifted by Megatron and are repaired"
        announce(f"{repaired}{lost if reshard.lost_elements else ''}; {reshard.fill()}")


def _accepts_lost() -> bool:
    return os.environ.get(LOST_VARIABLE) == "1"


def _megatron_version() -> tuple[int, int]:
    major, minor = str(sys.modules["megatron.core"].__version__).split(".")[:2]
    return int(major), int(minor)


def _random_state_grid(arguments: Any) -> tuple[int, ...]:
    """The grid of random states that this Megatron asks for (`get_rng_state`, megatron/training/checkpointing.py).

    Stock ignores what was stored under another grid since 0.14, and before that ends the job.
    """
    grid = (arguments.pipeline_model_parallel_size, arguments.tensor_model_parallel_size)
    if _megatron_version() == (0, 16) and arguments.expert_model_parallel_size > 1:
        return (*grid, arguments.data_parallel_size * arguments.context_parallel_size)
    return grid


@contextmanager
def _overridden(arguments: Any, **values: Any) -> Iterator[None]:
    """Set arguments for the time of a call, whatever happens in it."""
    before = {name: getattr(arguments, name) for name in values}
    vars(arguments).update(values)
    try:
        yield
    finally:
        vars(arguments).update(before)


def _saves_distributed_optimizer(scope: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    arguments = scope["get_args"]()
    return (
        call["optimizer"] is not None
        and getattr(arguments, "use_distributed_optimizer", False)
        and not arguments.no_save_optim
    )


def _record(
    groups: tuple[RecordedGroup, ...], arguments: Mapping[str, Any], iteration: int, saved: SaveRecord
) -> str:
    """The sidecar's text; empty where it cannot be made: a checkpoint without it is as good as before."""
    if not groups:
        return ""
    try:
        # Behind a plus Megatron puts the commit of whatever repository it lies in.
        megatron = str(getattr(sys.modules.get("megatron.core"), "__version__", "unknown")).partition("+")[0]
        return sidecar_text(groups, arguments, iteration, (__version__, megatron), saved)
    except Exception as error:  # noqa: BLE001 - see the docstring
        announce(f"no sidecar beside iteration {iteration}: {error}; resuming will recover the layout instead")
        return ""


def _gathered(chunks: Any, optimizer: Any) -> tuple[RecordedGroup, ...]:
    try:
        own = recorded_groups(chunks, optimizer)
    except Exception as error:  # noqa: BLE001 - every rank must reach the gathering, and the save must not fail
        announce(f"no sidecar for this job: {type(error).__name__}: {error}")
        own = []
    return merged(group for groups in gather(own) for group in groups)
