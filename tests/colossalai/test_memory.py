"""Test the peak memory of making a state dict: the output and one chunk on rank 0, one chunk elsewhere."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from colossalai_on_cpu import ranks

from mcore_ckpt_ext import zero_strict_state_dict as strict
from tests.colossalai.jobs import same_bits, wrap
from tests.colossalai.models import Wide

MIB = 1 << 20
_M_MMAP_THRESHOLD = -3


@pytest.mark.parametrize("kind", ["whole", pytest.param("shards", marks=pytest.mark.nightly)])
def test_peak_memory(kind: str) -> None:
    # Two layers a chunk: 12.5 MiB of fp32; the output is 150 MiB.
    chunk = 2 * Wide.WIDTH**2

    def job() -> tuple[float, bool]:
        # Freed memory goes back at once, and does not count as used.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
        model, _ = wrap(Wide, chunk_size=chunk)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident()
        if kind == "whole":
            state = strict.zero_strict_state_dict(model)
            assert bool(state) == (dist.get_rank() == 0)
            if state:
                return _grown(before), _is_right(state)
        else:
            for _ in strict.iter_zero_strict_state_dict(model, 16 * MIB):
                pass
        return _grown(before), True

    (first, is_right), (second, _) = ranks.run(2, job)
    # A shard is sent in several pieces here.
    assert is_right
    output = Wide.LAYERS * Wide.WIDTH**2 * 4 / MIB if kind == "whole" else 16
    assert first <= output + chunk * 4 / MIB + 64
    assert second <= chunk * 4 / MIB + 64
    assert kind == "shards" or first > output / 2, "nothing was measured"


def _grown(before: int) -> float:
    return (peak() - before) / MIB


def _is_right(state: dict[str, torch.Tensor]) -> bool:
    """Whether it is the module that was wrapped, rounded as ColossalAI rounds it."""
    torch.manual_seed(0)
    return same_bits(state, {name: value.bfloat16().float() for name, value in Wide().state_dict().items()})


def resident() -> int:
    return _status("VmRSS:")


def peak() -> int:
    return _status("VmHWM:")


def _status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
