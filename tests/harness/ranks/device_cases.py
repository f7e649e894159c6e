"""Loads the cases of an order into a model on a device whose memory the CPU cannot access.

Copies between the two are counted. With TEST_OUT_OF_MEMORY a case is loaded repeatedly. Each time an allocation on the
device fails, on the rank that the variable names, at another place of this package, until none is left.
"""

from __future__ import annotations

import functools
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import load_cases
import torch
from live_job import Live, training
from load_cases import WriteDetector

from mcore_ckpt_ext.megatron.live import sharded_load
from mcore_ckpt_ext.megatron.live.digests import Digester

sys.path.append(str(Path(__file__).parents[3]))  # ranks do not start in the repository
from tests.harness import device as test_device
from tests.harness.device import DeviceTensor, device
from tests.harness.device_group import device_groups

WHOLE_LOAD = "load"
PACKAGE = "mcore_ckpt_ext"
OUT_OF_MEMORY_VARIABLE = "TEST_OUT_OF_MEMORY"
crossed: dict[str, dict[str, int]] = {}


def main() -> None:
    """Run all cases, in the memory of the device."""
    sharded_load._PLAIN = (*sharded_load._PLAIN, DeviceTensor)
    measured, install = WriteDetector._measured, WriteDetector.install
    WriteDetector._measured = lambda self, phase, function: measured(self, phase, counted(phase, function))

    def install_counting(witness: WriteDetector) -> None:
        install(witness)
        training.load_checkpoint = counted(WHOLE_LOAD, training.load_checkpoint)

    WriteDetector.install = install_counting
    load_cases.load = functools.partial(load, load_cases.load)
    with device(), device_groups():
        load_cases.main()


def counted(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to count copies during its calls."""

    @functools.wraps(function)
    def call(*positional: Any, **keywords: Any) -> Any:
        before = replace(test_device.COUNTS)
        try:
            return function(*positional, **keywords)
        finally:
            now = asdict(test_device.COUNTS)
            crossed[phase] = {name: value - getattr(before, name) for name, value in now.items()}

    return call


def load(original: Callable[..., Any], case: dict[str, Any], live: Live, witness: WriteDetector) -> dict[str, Any]:
    """Run one case, or the same one repeatedly, and add the counts to its report."""
    crossed.clear()
    rank = case["environment"].get(OUT_OF_MEMORY_VARIABLE)
    if rank is not None:
        fails_here = int(rank) == torch.distributed.get_rank()
        return {"attempts": without_memory(functools.partial(original, case, live, witness), fails_here)}
    outcome: dict[str, Any] = original(case, live, witness)
    return outcome | {"crossed": dict(crossed), "held": held(live), "digests": digests(live)}


def digests(live: Live) -> dict[str, str]:
    """Return digests of the remainders that a save would record, by parameter; empty for whole masters."""
    problems: list[str] = []
    digester = Digester([unwrapped(chunk) for chunk in live.model], live.optimizer, problems.append)
    taken = digester.begin(live.optimizer, in_background=False)
    taken.share()
    found = {name: kinds for group in taken.recorded() for name, kinds in group.parameters.items()}
    if problems:
        raise RuntimeError("; ".join(problems))
    return {name: text for name, kinds in found.items() for text in kinds.values()}


def unwrapped(chunk: Any) -> Any:
    """Return a model chunk without its wrappers."""
    return unwrapped(chunk.module) if hasattr(chunk, "module") else chunk


def held(live: Live) -> dict[str, int]:
    """Return the number of elements that the optimizer updates on each device."""
    found = {"cpu": 0, test_device.KIND: 0}
    for outer in live.optimizers:
        for stepper in getattr(outer.optimizer, "sub_optimizers", [outer.optimizer]):
            for group in stepper.param_groups:
                for parameter in group["params"]:
                    found[parameter.device.type] += parameter.numel()
    return found


def without_memory(load_once: Callable[[], dict[str, Any]], fails_here: bool) -> list[dict[str, Any]]:
    """Load until an allocation has failed once at every place."""
    attempts, failure, inner = list[dict[str, Any]](), Failure(), training.load_checkpoint
    happened = [True]
    while any(happened):
        failure.place = None
        training.load_checkpoint = functools.partial(failure.within, inner) if fails_here else inner
        outcome = load_once()
        attempts.append({name: outcome[name] for name in ("error", "types", "before", "after", "lines")})
        happened = [False] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(happened, failure.place is not None)
    training.load_checkpoint = inner
    return attempts


class Failure:
    """Makes an allocation on the device fail, at another place of the program each time.

    Attributes:
        place: where one has failed.
    """

    def __init__(self) -> None:
        self.place: tuple[str, ...] | None = None
        self._places: set[tuple[str, ...]] = set()

    def within(self, function: Callable[..., Any], *positional: Any, **keywords: Any) -> Any:
        """Call a function during which an allocation fails."""
        test_device.BEFORE_ALLOCATION.append(self)
        try:
            return function(*positional, **keywords)
        finally:
            test_device.BEFORE_ALLOCATION.remove(self)

    def __call__(self, number: int, nbytes: int) -> None:
        frames = [(frame, line) for frame, line in traceback.walk_stack(None) if _owner(frame)]
        place = tuple(f"{frame.f_code.co_filename}:{line}" for frame, line in frames if _owner(frame) == PACKAGE)
        if not frames or _owner(frames[0][0]) != PACKAGE:
            return  # an allocation by Megatron
        if self.place is None and place not in self._places:
            self.place = place
            self._places.add(place)
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes.")


def _owner(frame: types.FrameType) -> str:
    """Return the owner of a frame's code: this package or Megatron; empty for all others."""
    name = str(frame.f_globals["__name__"]).partition(".")[0]
    return name if name in (PACKAGE, "megatron") else ""


if __name__ == "__main__":
    main()
