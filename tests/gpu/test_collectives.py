"""Test that ranks agree over a backend of devices alone, since NCCL cannot use the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

from mcore_ckpt_ext.devices import accelerator_type, device_module
from mcore_ckpt_ext.group_device import default_backend
from mcore_ckpt_ext.selftest.launcher import Ended, all_on_this_node, log_of, start

RANK = """
import os, sys
import torch, torch.distributed as dist
from mcore_ckpt_ext.collectives import agree, gather, highest_of_all
from mcore_ckpt_ext.devices import accelerator_type, device_module
from mcore_ckpt_ext.errors import ResumeRefusedError, UsageError

rank = int(os.environ["RANK"])
device_module(accelerator_type()).set_device(rank)
dist.init_process_group(BACKEND)
size = dist.get_world_size()
assert gather(rank) == list(range(size))
assert gather("x" * 100_000 * rank) == ["x" * 100_000 * one for one in range(size)]
group = dist.new_group(list(range(size)))
assert gather("x" * 3_000_000 * rank, group) == ["x" * 3_000_000 * one for one in range(size)]
assert highest_of_all([rank, -rank], group) == [size - 1, 0]

def work():
    if rank == size - 1:
        raise UsageError("this rank refuses")

try:
    agree("testing", work)
except ResumeRefusedError as error:
    assert "this rank refuses" in str(error)
else:
    sys.exit("no rank has refused")
assert gather(rank) == list(range(size))
dist.destroy_process_group()
"""


def run(folder: Path, ranks: int, backend: str, program: str = RANK) -> Ended:
    code = program.replace("BACKEND", repr(backend))
    return start(
        all_on_this_node(ranks), folder / "order.json", progress=lambda: 0, patience=120,
        program=(sys.executable, "-c", code),
    )  # fmt: skip


def test_the_refusal_of_one_rank_is_that_of_all(tmp_path: Path) -> None:
    kind = accelerator_type()
    assert kind is not None
    ranks = device_module(kind).device_count()  # one rank alone shows that messages go through the device, no more
    ended = run(tmp_path, ranks, default_backend(kind))
    assert ended.succeeded, f"{ended}\n" + "\n".join(log_of(tmp_path, rank).read_text() for rank in range(ranks))
