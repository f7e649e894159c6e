"""Plugin of `saving.py`: measures in each rank how long a save stalls training; rank 0 reports.

The package's own functions are timed separately, without Megatron's functions that they call. They include their
collectives, except for the first one in which ranks meet: the same wait would otherwise occur in Megatron's next one.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import saving_writer
import torch

IS_PLUGGED = os.environ["MCORE_CKPT_EXT"] == "1"
# The functions of this package that a save calls on rank 0, except those that only delegate: module, class, methods.
OWN = (
    ("megatron.saving.atomic_write", "Disk", ("prepare",)),
    ("megatron.saving.ranks", "JobRanks", ("agree_on",)),
    ("megatron.saving.publisher", "Publisher", ("begin", "finish")),
    ("megatron.saving.strategies", "MegatronWriters", ("take_over",)),
    ("megatron.save", None, ("problems_on_disk", "stored_bytes")),
    ("megatron.live.digests", "Digester", ("begin",)),
    ("megatron.live.digests", "Digests", ("share",)),
)
measured: dict[str, Any] = {
    "stalls": [],
    "own": [],
    "steps": {"under way": [], "usual": []},
}
state = {"own": 0.0, "step": 0.0, "disturbed": True}


def timed(work: Callable[..., Any], add: Callable[[float], None]) -> Callable[..., Any]:
    """Return the function with a report of its seconds."""

    @functools.wraps(work)
    def run(*positional: Any, **keywords: Any) -> Any:
        begun = time.perf_counter()
        try:
            return work(*positional, **keywords)
        finally:
            add(time.perf_counter() - begun)

    return run


def install() -> None:
    """Wrap the functions that training calls, outside of all other wrappers."""
    training: Any = importlib.import_module("megatron.training.training")
    checkpointing: Any = importlib.import_module("megatron.training.checkpointing")
    async_utils: Any = importlib.import_module("megatron.training.async_utils")
    if IS_PLUGGED:
        saving: Any = importlib.import_module("mcore_ckpt_ext.megatron.save")
        problems = saving.problems_on_disk
        # A generator does its work on iteration.
        saving.problems_on_disk = lambda *positional: list(problems(*positional))
        for module, kind, names in OWN:
            place: Any = importlib.import_module(f"mcore_ckpt_ext.{module}")
            place = getattr(place, kind) if kind else place
            for name in names:
                setattr(place, name, timed(getattr(place, name), functools.partial(add_own, name)))
    save = training.save_checkpoint

    def save_checkpoint(*positional: Any, **keywords: Any) -> Any:
        # All ranks start together; otherwise the first collective measures the delay of the last rank.
        torch.distributed.barrier()
        measured["stalls"].append(0.0)
        measured["own"].append({})
        state["disturbed"] = True
        return timed(save, add_stall)(*positional, **keywords)

    training.save_checkpoint = save_checkpoint
    training.maybe_finalize_async_save = timed(training.maybe_finalize_async_save, add_stall)
    slowed = float(os.environ["SAVING_SLOWED"])
    if slowed:
        schedule = checkpointing.schedule_async_save
        checkpointing.schedule_async_save = lambda request: schedule(
            request._replace(async_fn=functools.partial(saving_writer.slowed, request.async_fn, slowed))
        )
    step = training.train_step

    def train_step(*positional: Any, **keywords: Any) -> Any:
        kind = "usual" if async_utils.is_empty_async_queue() else "under way"
        now = time.perf_counter()
        if not state["disturbed"]:
            measured["steps"][kind].append(now - state["step"])
        state["step"], state["disturbed"] = now, False
        result = step(*positional, **keywords)
        if torch.distributed.get_rank() == 0:
            Path(os.environ["SAVING_REPORT"]).write_text(json.dumps(measured))
        return result

    training.train_step = train_step


def add_own(name: str, seconds: float) -> None:
    """Add to the latest save."""
    if measured["own"]:
        measured["own"][-1][name] = measured["own"][-1].get(name, 0.0) + seconds


def add_stall(seconds: float) -> None:
    """Add to the latest save."""
    if measured["stalls"]:
        measured["stalls"][-1] += seconds


install()
