"""Plugin of `loading.py`: measures the job's load on each rank, from barrier to barrier, and ends the job after it."""

from __future__ import annotations

import cProfile
import functools
import importlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from memory import forget, remember, touch

HAS_DEVICE = torch.accelerator.is_available()  # False in the laboratory
if not HAS_DEVICE:
    # torch's optimizers move loaded state to the device of its parameter. On a GPU the state is there already; the
    # laboratory would count a move to the CPU as a copy from a GPU.
    torch.optim.Optimizer._process_value_according_to_param_policy = staticmethod(  # type: ignore[method-assign]
        lambda param, value, *_, **__: value.to(param.dtype)
    )
training: Any = importlib.import_module("megatron.training.training")
load_checkpoint = training.load_checkpoint


def status(name: str) -> int:
    """Return a field of this process's memory in bytes, as reported by Linux."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def bytes_asked() -> int:
    """Return the number of bytes that this process has read so far, from files and elsewhere."""
    found = re.search(r"^rchar: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def bytes_held(chunks: Any, optimizer: Any) -> int:
    """Return the bytes of this rank's weights, masters and moments, which a load has to read at least."""
    weights = [parameter for chunk in chunks for parameter in chunk.parameters()]
    inner = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    masters = [master for one in inner for group in one.param_groups for master in group["params"]]
    moments = [value for one in inner for kept in one.state.values() for value in kept.values()]
    tensors = {id(held): held for held in (*weights, *masters, *moments) if isinstance(held, torch.Tensor)}
    return sum(held.nbytes for held in tensors.values())


@functools.wraps(load_checkpoint)
def measured(*positional: Any, **keywords: Any) -> None:
    """Load, report, end."""
    profile = cProfile.Profile(time.process_time) if os.environ.get("LOADING_PROFILE") else None
    folder, rank = Path(os.environ["LOADING_FOLDER"]), int(os.environ["RANK"])
    remember(folder, rank, int(os.environ["WORLD_SIZE"]))
    touch(int(os.environ["LOADING_BYTES"]))
    torch.distributed.barrier()
    if os.environ.get("LOADING_COLD") and rank == 0:
        forget(folder)
    torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    before, asked, begun, busy = status("VmRSS"), bytes_asked(), time.perf_counter(), time.process_time()
    if profile:
        profile.enable()
    load_checkpoint(*positional, **keywords)
    if profile:
        profile.disable()
    if HAS_DEVICE:
        torch.accelerator.synchronize()
    processor, asked = time.process_time() - busy, bytes_asked() - asked
    torch.distributed.barrier()
    seconds = time.perf_counter() - begun
    found = {"seconds": seconds, "processor": processor, "asked": asked, "held": bytes_held(*positional[:2])}
    on_device = torch.cuda.max_memory_allocated() - held
    memory = {"on_device": on_device, "before": before, "peak": status("VmHWM"), "after": status("VmRSS")}
    report = Path(os.environ["LOADING_REPORT"]) / f"{os.environ['RANK']}"
    report.with_suffix(".json").write_text(json.dumps(found | memory))
    if profile:
        profile.dump_stats(report.with_suffix(".profile"))
    torch.distributed.barrier()
    os._exit(0)


training.load_checkpoint = measured
