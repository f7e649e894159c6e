"""Test reading into a real device's memory: every format bit for bit, large files at the machine's rate."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext.devices import accelerator_type, current_device, device_module, host_buffer
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.storage.pinned import STAGE_BYTES, Stages
from mcore_ckpt_ext.transfer import read_slice
from tests.harness.checkpoints import APART, INTACT, fixture_named

FILE_BYTES = 1 << 30
RUNS = 5
# Of the slower of the two ways that the bytes go: from the file to pinned memory, and from there to the device.
LEAST_SHARE = 0.6


@pytest.fixture
def device() -> torch.device:
    kind = accelerator_type()
    assert kind is not None
    return current_device(kind)


@pytest.mark.parametrize("name", [*INTACT, *APART])
def test_every_format_is_read_bit_for_bit(name: str, device: torch.device) -> None:
    fixture = fixture_named(name)
    checkpoint = open_checkpoint(fixture.iteration if fixture.iteration.exists() else fixture.run)

    def on_device(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    for kind in checkpoint.kinds():
        for parameter in checkpoint.names(kind):
            region = Region.whole(parameter, checkpoint.tensor(kind, parameter).shape)
            found = read_slice(checkpoint, checkpoint.files.transfer, kind, Slice.whole((region,)), allocate=on_device)
            truth = fixture.truth[f"{kind}.{parameter}"].reshape(-1)
            assert torch.equal(found.cpu().view(torch.uint8), truth.view(torch.uint8)), (kind, parameter)


def test_staging_is_as_fast_as_the_machine(device: torch.device, tmp_path: Path, figure: Callable[[str], None]) -> None:
    """While one block travels to the device, the next one is read: no slower than the slower of the two alone."""
    path = tmp_path / "bytes"
    path.write_bytes(os.urandom(STAGE_BYTES) * (FILE_BYTES // STAGE_BYTES))
    truth = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    target = torch.zeros(FILE_BYTES, dtype=torch.uint8, device=device)
    block, stages = host_buffer(STAGE_BYTES), Stages()
    offsets = range(0, FILE_BYTES, STAGE_BYTES)
    with path.open("rb", buffering=0) as file:

        def read(offset: int, into: torch.Tensor) -> None:
            os.preadv(file.fileno(), [memoryview(into.numpy())], offset)

        def reads() -> None:
            for offset in offsets:
                read(offset, block)

        def copies() -> None:
            for offset in offsets:
                target[offset : offset + STAGE_BYTES].copy_(block, non_blocking=True)
            device_module(device.type).synchronize()

        def staged() -> None:
            for offset in offsets:
                stages.send(
                    STAGE_BYTES,
                    lambda filled, offset=offset: read(offset, filled),
                    target[offset : offset + STAGE_BYTES],
                )
            stages.wait()

        rates = {one.__name__: FILE_BYTES / _median_seconds(one) / 1e9 for one in (reads, copies, staged)}
    figure("staging: " + ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in rates.items()))
    assert torch.equal(target.cpu(), truth)
    assert rates["staged"] > LEAST_SHARE * min(rates["reads"], rates["copies"])


def _median_seconds(work: Callable[[], None]) -> float:
    work()
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def test_reading_needs_no_extra_device_memory(device: torch.device) -> None:
    """What is read goes to where it stays: no second copy of it is on the device meanwhile."""
    checkpoint = open_checkpoint(fixture_named("p10").run)
    memory = device_module(device.type)
    for parameter in checkpoint.names("fp32_param"):
        region = Region.whole(parameter, checkpoint.tensor("fp32_param", parameter).shape)
        before = memory.memory_allocated()
        memory.reset_peak_memory_stats()
        found = read_slice(
            checkpoint, checkpoint.files.transfer, "fp32_param", Slice.whole((region,)),
            allocate=lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device),
        )  # fmt: skip
        assert memory.max_memory_allocated() - before <= found.nbytes + 512
        del found
