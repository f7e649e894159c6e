"""Runs the real `load_checkpoint` once for each case of the order, and reports the observations of each rank.

A case is an object with a `name`, and optionally `arguments` and `environment` to change temporarily, `model` with
arguments of a model to build for it, and `dump`, a folder for the live optimizer afterwards.

Environment variables name a rank: with TEST_READ_FAILS its disk fails after this package has read the tensors that
Megatron requests, with TEST_OWN_READ_FAILS when it reads data that only it needs, with TEST_SHARED_READ_FAILS when it
reads data to send. With TEST_SEES_NOTHING it gets no checkpoint.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import live_job
import torch
from live_job import Live, changed, training
from megatron_on_cpu import dump_optimizer

import mcore_ckpt_ext
from mcore_ckpt_ext.megatron.live.broadcast_read import ReadOnce
from mcore_ckpt_ext.megatron.live.reading import Reading
from mcore_ckpt_ext.optimizer_reshard import LiveRank
from mcore_ckpt_ext.storage import files
from mcore_ckpt_ext.transfer import Transfer

hook: Any = importlib.import_module("mcore_ckpt_ext.megatron.load")
fast_load: Any = importlib.import_module("mcore_ckpt_ext.megatron.fast_load")
proof: Any = importlib.import_module("mcore_ckpt_ext.megatron.check_after_load")
resuming: Any = importlib.import_module("mcore_ckpt_ext.megatron.probe")
checkpointing: Any = importlib.import_module("megatron.training.checkpointing")
_PLAIN = (bool, int, float, str, list, type(None))
_PROGRESS = {"iteration": 0, "consumed_train_samples": 0, "consumed_valid_samples": 0, "skipped_train_samples": 0}


class WriteDetector:
    """Observes this package in one load: calls of stock Megatron's function, log lines, resumes, memory."""

    def __init__(self) -> None:
        self.stock_calls: list[tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = []
        self.lines: list[str] = []
        self.resumes: list[tuple[Any, LiveRank]] = []
        self.fast: list[int] = []
        self.memory: dict[str, int] = {}
        self.index_reads = 0
        self.reads: list[tuple[str, int, int]] = []
        self.is_reading = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith("/.metadata"):
            self.index_reads += 1

    def install(self) -> None:
        """Replace stock Megatron's function, below this package's wrapper, and observe this package."""
        mcore_ckpt_ext.uninstall()
        checkpointing.load_checkpoint = self._listening(checkpointing.load_checkpoint)
        training.load_checkpoint = checkpointing.load_checkpoint
        mcore_ckpt_ext.install()
        hook.announce = proof.announce = resuming.announce = fast_load.announce = self._announce
        fast_load.ShardedLoad.read = self._noted(self._counted(fast_load.ShardedLoad.read))
        Reading.read = self._noted(Reading.read)  # type: ignore[method-assign]
        files.os = self  # type: ignore[attr-defined]
        ReadOnce._read = failing("TEST_SHARED_READ_FAILS", ReadOnce._read)  # type: ignore[method-assign]
        Transfer.execute = failing("TEST_OWN_READ_FAILS", Transfer.execute)  # type: ignore[method-assign]
        for phase, name in (("prepare", "plan"), ("prove", "verify_masters"), ("fill", "fill")):
            setattr(LiveRank, name, self._measured(phase, getattr(LiveRank, name)))

    def _announce(self, line: str, *, every_rank: bool = False, each_time: bool = False) -> None:
        """Of the product; a line of one rank's own is marked, every other is logged on rank 0 alone."""
        self.lines.append(f"on this rank: {line}" if every_rank else line)

    def _listening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_checkpoint(*positional: Any, **keywords: Any) -> Any:
            self.stock_calls.append((positional, keywords, dict(vars(live_job.get_args()))))
            return original(*positional, **keywords)

        return load_checkpoint

    def __getattr__(self, name: str) -> Any:
        """Return attributes of `os`, which this object replaces where files are read."""
        return getattr(os, name)

    def preadv(self, descriptor: int, buffers: Any, offset: int) -> int:
        """Replace `os.preadv`, and record reads of tensors."""
        count = os.preadv(descriptor, buffers, offset)
        if self.is_reading:
            self.reads.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), offset, offset + count))
        return count

    def _noted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(*positional: Any) -> Any:
            self.is_reading = True
            try:
                return original(*positional)
            finally:
                self.is_reading = False

        return read

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(load: Any) -> Any:
            self.fast.append(load.bytes_read)
            result = original(load)
            failing("TEST_READ_FAILS", bool)()
            return result

        return read

    def _measured(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def measured(*positional: Any, **keywords: Any) -> Any:
            # Freed memory must not be reused for allocations of the phase; then the peak is reset.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before, held = _kibibytes("VmRSS"), torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            result = original(*positional, **keywords)
            self.memory[f"{phase}, device"] = torch.cuda.max_memory_allocated() - held
            if phase == "prepare":
                self.resumes.append((positional[1], positional[0]))
            self.memory[phase] = 1024 * (_kibibytes("VmHWM") - before)
            return result

        return measured

    def forget(self) -> None:
        """Reset the observations for the next load."""
        for heard in (self.stock_calls, self.lines, self.resumes, self.memory, self.fast, self.reads):
            heard.clear()
        self.index_reads = 0


def failing(variable: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to fail on the rank that a variable names."""

    @functools.wraps(original)
    def call(*positional: Any) -> Any:
        if str(torch.distributed.get_rank()) == os.environ.get(variable):
            raise OSError(errno.EIO, "the disk is gone")
        return original(*positional)

    return call


def _kibibytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def load(case: dict[str, Any], live: Live, witness: WriteDetector) -> dict[str, Any]:
    """Run one case, from a filled optimizer to a report."""
    witness.forget()
    arguments = live_job.get_args()
    live.fill_with_noise(seed=1)
    scheduler = training.get_optimizer_param_scheduler(live.optimizer)
    before = live.fingerprint()
    given: tuple[Any, ...] = (live.model, live.optimizer, scheduler), {"strict": True, "checkpointing_context": {}}
    error, result = None, None
    types: list[str] = []
    progress, environment = _PROGRESS | case["arguments"], case["environment"]
    if environment.get("TEST_SEES_NOTHING") == os.environ["RANK"]:
        progress["load"] = "/nowhere"
    with changed(vars(arguments), progress), changed(os.environ, environment):
        as_called = dict(vars(arguments))
        try:
            result = training.load_checkpoint(*given[0], **given[1])[0]
        except BaseException as refusal:
            error = f"{type(refusal).__name__}: {refusal}"
            types = [kind.__name__ for kind in type(refusal).__mro__]
        after = live.fingerprint()
        if "dump" in case:
            arguments.iteration = result
            dump_optimizer.dump(Path(case["dump"]), result, live.model, live.optimizer, scheduler)
    plain = {name: value for name, value in as_called.items() if isinstance(value, _PLAIN)}
    return {
        "arguments": plain if torch.distributed.get_rank() == 0 else {},
        "error": error,
        "types": types,
        "iteration": result,
        "before": before,
        "after": after,
        "lines": witness.lines.copy(),
        "passed_through": [_same_objects(given, call) and call[2] == as_called for call in witness.stock_calls],
        "resumes": len(witness.resumes),
        "fast": sum(witness.fast),
        "index reads": witness.index_reads,
        "reads": witness.reads.copy(),
        "elements": live.elements(),
        "largest": max(master.numel() for _, _, master in live.masters()),
        "memory": witness.memory.copy(),
        **(_counters(*witness.resumes[0]) if witness.resumes and error is None else {}),
    }


def _same_objects(given: tuple[Any, ...], call: tuple[Any, ...]) -> bool:
    positional, keywords = given
    return (
        len(positional) == len(call[0])
        and all(one is other for one, other in zip(positional, call[0], strict=True))
        and keywords.keys() == call[1].keys()
        and all(keywords[name] is call[1][name] for name in keywords)
    )


def _counters(resume: Any, rank: LiveRank) -> dict[str, Any]:
    return {
        "planned_bytes": rank.bytes_read,
        "filled_elements": sum(fill.stop - fill.start for plan in rank.reading.plans for fill in plan.fills),
        "read_bytes": resume.checkpoint.files.reader.bytes_read,
    }


def _value(text: Any) -> Any:
    """Return an argument as Megatron has it: dtypes are written by name."""
    is_dtype = isinstance(text, str) and text.startswith("torch.")
    return getattr(torch, text.removeprefix("torch.")) if is_dtype else text


def main() -> None:
    """Run all cases, one after the other; ranks stay in step because each case ends on all of them."""
    live_job.start()
    witness = WriteDetector()
    witness.install()
    models: dict[str, Live] = {}
    outcomes = {}
    for case in live_job.order():
        key = json.dumps(case.get("model", {}))
        with changed(vars(live_job.get_args()), {name: _value(text) for name, text in case.get("model", {}).items()}):
            if key not in models:
                models[key] = live_job.built()
            outcomes[case["name"]] = load(case, models[key], witness)
        torch.distributed.barrier()
    live_job.report(outcomes)


if __name__ == "__main__":
    main()
