"""Runs the real `pretrain` once for each job of the order, as if each started in a separate process.

TEST_SCRIPT names a checkout's own `pretrain_gpt.py`; without it, megatron-core is the installed one.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron_on_cpu.groups import leave_groups

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main as main_of_command
from mcore_ckpt_ext.patching.log import LoggedLines
from mcore_ckpt_ext.patching.singletons import PROCESS

_FORGET = {
    "megatron.training.global_vars": "destroy_global_vars",
    "megatron.core.num_microbatches_calculator": "destroy_num_microbatches_calculator",
    "megatron.core.rerun_state_machine": "destroy_rerun_state_machine",
    "megatron.core.parallel_state": "destroy_model_parallel",
    # It keeps the process groups of a layer that another job may have on another rank.
    "megatron.core.transformer.moe.moe_logging": "destroy_moe_metrics_tracker",
}


def code_of(job: Callable[[], None]) -> int:
    """Run a job, and return the exit code that its process would have."""
    try:
        job()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run(job: dict[str, Any]) -> None:
    """Run one job, from its command line to its end, and reset Megatron's state."""
    if rank() == 0:
        for words in job["commands"]:
            if main_of_command(words):
                raise RuntimeError(f"mcore-ckpt {' '.join(words)}")
    (mcore_ckpt_ext.uninstall if job["stock"] else mcore_ckpt_ext.install)()
    PROCESS.one(LoggedLines).clear()
    os.environ.update(job["environment"])
    sys.argv[1:] = job["arguments"]
    say(f"=== begins: {job['name']}")
    code = code_of(train)
    say(f"=== ended with code {code}")
    for name in job["environment"]:
        del os.environ[name]
    for module, function in _FORGET.items():
        getattr(sys.modules.get(module), function, lambda: None)()
    gc.collect()
    leave_groups()
    torch.distributed.barrier()
    if rank() == 0 and code == 0:
        for path, text in job["newest"].items():
            Path(path).write_text(text)
    torch.distributed.barrier()


def rank() -> int:
    """Return this process's rank, even before there are groups."""
    return int(os.environ["RANK"])


def train() -> None:
    """Run the training of the command line."""
    if script := os.environ.get("TEST_SCRIPT"):
        runpy.run_path(script, run_name="__main__")
    else:
        importlib.import_module("megatron_on_cpu.train_gpt").main()


def say(line: str) -> None:
    """Mark the start and end of a job between the lines of the job itself."""
    sys.stderr.flush()
    print(line, flush=True)


def main() -> None:
    """Run all jobs."""
    for job in json.loads(Path(os.environ["TEST_ORDER"]).read_text()):
        run(job)


if __name__ == "__main__":
    main()
