"""Test the test device: it refuses what a GPU refuses, and every format can be read into it, each byte once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from mcore_ckpt_ext.devices import host_buffer, is_staged, wait_for_copies
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.layout.master_check import (
    BY_EITHER_ROUNDING,
    BY_ROUNDING,
    WITHIN_FP4,
    WITHIN_FP8,
    WITHIN_FP8_TWICE,
    WITHIN_FP16,
    MasterCheck,
)
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.transfer import read_slice
from tests.harness import device as test_device
from tests.harness.checkpoints import APART, INTACT, fixture_named
from tests.harness.device import Counts, DeviceMemoryError, DeviceTensor, device


@pytest.fixture
def counts() -> Iterator[Counts]:
    with device() as found:
        yield found


def made() -> torch.Tensor:
    return torch.arange(6.0, device="cuda")


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: tensor.numpy(),
        lambda tensor: numpy.asarray(tensor),
        lambda tensor: memoryview(tensor),
        lambda tensor: numpy.frombuffer(tensor, dtype=numpy.float32),
        lambda tensor: int(tensor.data_ptr()),
        lambda tensor: pickle.dumps(tensor),
        lambda tensor: torch.from_dlpack(tensor),
        lambda tensor: tensor + torch.ones(6),
        lambda tensor: torch.cat([tensor, torch.ones(6)]),
        lambda tensor: torch.equal(tensor, torch.ones(6)),
        lambda tensor: torch.where(torch.ones(6, dtype=torch.bool), tensor, tensor),
        lambda tensor: tensor.index_add_(0, torch.tensor([1]), torch.ones(1)),
        lambda tensor: torch.ones(6).add_(tensor),
        lambda tensor: setattr(tensor, "data", torch.ones(6)),
        lambda tensor: tensor.__setitem__(slice(0, 6), torch.ones(6)),
    ],
)
def test_the_cpu_does_not_reach_it(use: Callable[[torch.Tensor], Any], counts: Counts) -> None:
    with pytest.raises((DeviceMemoryError, TypeError)):
        use(made())


def test_it_computes_like_the_cpu(counts: Counts) -> None:
    tensor = made()
    view = tensor.view(2, 3)[1]
    view.fill_(7)
    kept = torch.nn.Parameter(torch.zeros(6, device="cuda"))
    kept.data = tensor * 2
    for found in (view, kept, torch.empty_like(tensor), tensor.new_zeros(3), copy.deepcopy(tensor), tensor.half()):
        assert isinstance(found, DeviceTensor) and found.is_cuda
    assert isinstance(kept, torch.nn.Parameter)
    assert tensor.tolist() == [0, 1, 2, 7, 7, 7] and kept.tolist() == [0, 2, 4, 14, 14, 14]
    assert tensor.cpu().tolist() == tensor.tolist() and not isinstance(tensor.to("cpu"), DeviceTensor)
    assert tensor.data_ptr() == tensor.view(torch.uint8).data_ptr() != view.data_ptr()


def test_copies_across_are_counted(counts: Counts) -> None:
    tensor = made()
    tensor.copy_(torch.ones(6))
    tensor.cpu()
    torch.ones(3).to(tensor.device)
    assert (counts.to_device, counts.to_cpu, counts.copies) == (24 + 12, 24, 3)


def test_memory_that_is_used_again_too_early_gives_wrong_bytes(counts: Counts) -> None:
    """A copy that does not block reads its source when its turn comes."""
    assert is_staged(made().device)
    tensor, block = made(), host_buffer(24).view(torch.float32)
    for waits in (False, True):
        block.fill_(1.0)
        tensor.copy_(block, non_blocking=True)
        wait = wait_for_copies(tensor.device)
        if waits:
            wait()
        block.fill_(2.0)
        assert tensor.tolist() == [1.0 if waits else 2.0] * 6
    there = torch.zeros(6)
    there.copy_(tensor, non_blocking=True)
    early = there.tolist()
    wait_for_copies(tensor.device)()
    assert early != there.tolist() == [1.0] * 6


def test_an_allocation_can_fail(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int, nbytes: int) -> None:
        raise torch.OutOfMemoryError(f"allocation {number} of {nbytes} bytes")

    monkeypatch.setattr(test_device, "BEFORE_ALLOCATION", [refuse])
    with pytest.raises(torch.OutOfMemoryError, match="allocation 1 of 24 bytes"):
        torch.zeros(6, device="cuda")


PROOFS = (BY_ROUNDING, BY_EITHER_ROUNDING, WITHIN_FP16, WITHIN_FP8, WITHIN_FP4, WITHIN_FP8_TWICE)


@pytest.mark.parametrize("master_check", PROOFS, ids=lambda master_check: master_check.relation)
@pytest.mark.parametrize("is_wrong", [False, True])
def test_masters_are_compared_where_they_lie(master_check: MasterCheck, is_wrong: bool, counts: Counts) -> None:
    """With the same result as on the CPU, and nothing but that comes back."""
    masters = torch.linspace(-3, 3, 4096)
    weights = masters.to(torch.bfloat16)
    if is_wrong:
        masters[1234] = 7.0
    expected = master_check.first_mismatch(masters, weights)
    there = masters.to("cuda"), weights.to("cuda")
    before = counts.to_cpu
    assert master_check.first_mismatch(*there) == expected
    assert (expected is not None) == is_wrong
    assert counts.to_cpu - before <= 64


@pytest.mark.parametrize("name", [*INTACT, *APART])
def test_every_format_is_read_into_memory_of_the_device(name: str, counts: Counts) -> None:
    """What was live when it was saved, bit for bit; what is stored crosses once, and is waited for once a block."""
    fixture = fixture_named(name)
    checkpoint = open_checkpoint(fixture.iteration if fixture.iteration.exists() else fixture.run)

    def on_device(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cuda")

    for kind in checkpoint.kinds():
        for parameter in checkpoint.names(kind):
            region = Region.whole(parameter, checkpoint.tensor(kind, parameter).shape)
            before = counts.to_device
            found = read_slice(checkpoint, checkpoint.files.transfer, kind, Slice.whole((region,)), allocate=on_device)
            crossed = counts.to_device - before
            assert crossed == (found.nbytes if isinstance(found, DeviceTensor) else 0)
            truth = fixture.truth[f"{kind}.{parameter}"].reshape(-1)
            assert torch.equal(found.cpu(), truth), (kind, parameter)
    assert counts.to_device > 0
