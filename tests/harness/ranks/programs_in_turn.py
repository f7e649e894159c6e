"""Runs programs that use Megatron Core one after the other, in one launch, and dumps the live state of each.

argv: a JSON file with a list of {script, arguments, dump, stock, without, commands}; the first rank removes the files
`without`, and runs the commands of `mcore-ckpt`. The output of a turn contains the exception of its program, if any.
"""

from __future__ import annotations

import json
import runpy
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import core_model
import torch
from megatron.core import parallel_state
from megatron_on_cpu.groups import leave_groups
from torch.distributed.checkpoint.api import CheckpointException

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main as main_of_command


def train(wrapped: Any, optimizer: Any) -> None:
    """Set masters, moments, groups and weights as after some steps, equal on all copies of a parameter."""
    job = core_model.Job([wrapped], optimizer, {})
    for one in job.optimizers:
        for group in one.optimizer.param_groups:
            for master in group["params"]:
                moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
                one.optimizer.state[master] = moments
    core_model.fill_with_noise(job, is_tied(job), seed=7)


def is_tied(job: core_model.Job) -> bool:
    """Return whether the output layer is the word embedding."""
    return bool(job.models[0].share_embeddings_and_output_weights)


def run(turn: dict[str, Any]) -> str:
    """Run one program, and return how it ended."""
    parallel_state.destroy_model_parallel()
    leave_groups()
    (mcore_ckpt_ext.uninstall if turn["stock"] else mcore_ckpt_ext.install)()
    for path in turn["without"]:
        Path(path).unlink(missing_ok=True)
    if torch.distributed.get_rank() == 0:
        for words in turn["commands"]:
            if main_of_command(words):
                raise RuntimeError(f"mcore-ckpt {' '.join(words)}")
    torch.distributed.barrier()
    sys.argv = [turn["script"], *turn["arguments"]]
    try:
        left = Namespace(**runpy.run_path(turn["script"], {"train": train}, run_name="__main__"))
    except (Exception, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    if turn["dump"]:
        job = core_model.Job([left.wrapped], left.optimizer, {})
        core_model.dump(job, Path(turn["dump"]), is_tied(job))
    return "done"


torch.distributed.init_process_group("gloo")
torch.distributed.init_process_group = lambda *_, **__: None  # called by the programs
for number, turn in enumerate(json.loads(Path(sys.argv[1]).read_text())):
    ended = run(turn)
    sys.stdout.write(f"=== {number} {' '.join(ended.split())}\n")
    sys.stdout.flush()
    torch.distributed.barrier()
