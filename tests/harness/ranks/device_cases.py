"""Loads the cases of an order into a model on a device whose memory the CPU cannot access.

Copies between the two are counted. With TEST_OUT_OF_MEMORY a case is loaded repeatedly. Each time an allocation on the
device fails, on the rank that the variable names, at another place of this package, until none is left. With
TEST_SAVES_TO, the loaded state is saved to that folder; then the allocations of the save fail instead.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import load_cases
import torch
from live_job import Live, changed, get_args, training
from load_cases import WriteDetector

from mcore_ckpt_ext.megatron.live import sharded_load
from mcore_ckpt_ext.megatron.live.digests import Digester

sys.path.append(str(Path(__file__).parents[3]))  # ranks do not start in the repository
from tests.harness import device as test_device
from tests.harness.device import DeviceTensor, device
from tests.harness.device_group import device_groups
from tests.harness.device_quantized import quantized_on_device
from tests.harness.out_of_memory import Failure

WHOLE_LOAD = "load"
SAVE, SAVE_IN_BACKGROUND = "save", "save in the background"
OUT_OF_MEMORY_VARIABLE = "TEST_OUT_OF_MEMORY"
SAVE_VARIABLE = "TEST_SAVES_TO"
ITERATION = 4
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
    with torch.no_grad(), device(), device_groups(), quantized_on_device():
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
    rank, save_to = (case["environment"].get(name) for name in (OUT_OF_MEMORY_VARIABLE, SAVE_VARIABLE))
    if rank is not None and save_to is None:
        fails_here = int(rank) == torch.distributed.get_rank()
        return {"attempts": without_memory(functools.partial(original, case, live, witness), fails_here)}
    outcome: dict[str, Any] = original(case, live, witness)
    if rank is not None:
        return outcome | {"saved": save_without_memory(live, Path(save_to), int(rank))}
    if save_to is not None:
        save(live, Path(save_to))
    return outcome | {"crossed": dict(crossed), "held": held(live), "digests": digests(live)}


def save(live: Live, folder: Path) -> None:
    """Save what is live, and once more in the background, each into a folder of its name."""
    for phase, is_asynchronous in {SAVE: False, SAVE_IN_BACKGROUND: True}.items():
        counted(phase, functools.partial(save_once, live, folder / phase, is_asynchronous))()


def save_once(live: Live, folder: Path, is_asynchronous: bool) -> None:
    """Call Megatron's `save_checkpoint`, and wait until the checkpoint is complete."""
    arguments = get_args()
    values = {"save": str(folder), "async_save": is_asynchronous, "iteration": ITERATION, "ckpt_format": "torch_dist"}
    with changed(vars(arguments), values):
        scheduler = training.get_optimizer_param_scheduler(live.optimizer)
        training.save_checkpoint(ITERATION, live.model, live.optimizer, scheduler, 0)
        training.maybe_finalize_async_save(blocking=True)


def save_without_memory(live: Live, folder: Path, fails_on: int) -> list[str]:
    """Save until no place is left at which an allocation has not failed once; returns the folders, in order."""
    folders, failure = list[str](), Failure()
    happened = [True]
    while any(happened):
        failure.place = None
        folders.append(str(folder / str(len(folders))))
        save = functools.partial(save_once, live, Path(folders[-1]), len(folders) % 2 == 0)
        failure.within(save) if fails_on == torch.distributed.get_rank() else save()
        happened = [False] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(happened, failure.place is not None)
    return folders


def digests(live: Live) -> dict[str, str]:
    """Return digests of the remainders that a save would record, by parameter; empty for whole masters."""
    problems: list[str] = []
    digester = Digester([unwrapped(chunk) for chunk in live.model], live.optimizer, problems.append)
    taken = digester.begin(live.optimizer, in_background=False)
    taken.share()
    found = {name: kinds for group in taken.recorded_digests() for name, kinds in group.parameters.items()}
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


if __name__ == "__main__":
    main()
