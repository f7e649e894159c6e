"""Test the choice of devices: the process group's backends decide, and one module names the accelerator.

An accelerator from outside torch is registered as torch_npu does it, in a separate process: it stays registered.
"""

from __future__ import annotations

import multiprocessing
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt_ext import devices
from mcore_ckpt_ext.collectives import gather
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.group_device import control_device, default_backend, payload_device
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.transfer import read_slice
from tests.harness.checkpoints import fixture_named
from tests.harness.device import device
from tests.harness.device_group import BACKENDS_VARIABLE, device_groups

CPU = torch.device("cpu")


def with_npu(current: int = 5) -> None:
    """Register an accelerator "npu" with a backend "hccl", and no memory."""
    torch.utils.rename_privateuse1_backend("npu")
    module = types.ModuleType("torch.npu")
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.current_device = lambda: current  # type: ignore[attr-defined]
    module.device_count = lambda: 8  # type: ignore[attr-defined]
    torch._register_device_module("npu", module)
    dist.Backend.register_backend(
        "hccl", lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout), devices=["npu"]
    )


def start(backend: str | None, **more: Any) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **more)


def in_a_process(work: Callable[[], Any]) -> Any:
    """Run a function in a forked process; returns its result."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def run() -> None:
        try:
            results.put(work())
        except Exception as error:
            results.put(f"{type(error).__name__}: {error}")

    process = context.Process(target=run)
    process.start()
    found = results.get()
    process.join(60)
    return found


def devices_of(backend: str | None, **more: Any) -> tuple[str, str]:
    """Return the devices of control and payload of a job with an NPU."""

    def work() -> tuple[str, str]:
        with_npu()
        start(backend, **more)
        return str(control_device()), str(payload_device())

    found: tuple[str, str] = in_a_process(work)
    return found


def test_a_gloo_group_takes_tensors_of_the_cpu_on_a_node_with_gpus() -> None:
    def work() -> tuple[Any, ...]:
        torch.cuda.is_available = lambda: True  # type: ignore[assignment]
        torch.accelerator.is_available = lambda: True  # type: ignore[assignment]
        start("gloo")
        return control_device(), payload_device(), gather("told")

    assert in_a_process(work) == (CPU, CPU, ["told"])


def test_a_program_without_ranks_uses_the_cpu() -> None:
    assert (control_device(), payload_device()) == (CPU, CPU)


def test_a_backend_from_outside_torch_takes_tensors_of_its_own_device() -> None:
    """The current device counts, not the rank in the node: with one visible device each rank's is number 0."""
    assert devices_of("hccl") == ("npu:5", "npu:5")


def test_of_several_backends_numbers_take_the_cpu_and_tensors_the_accelerator() -> None:
    assert devices_of("cpu:gloo,npu:hccl") == ("cpu", "npu:5")


def test_the_device_that_a_group_is_bound_to_counts_more_than_the_current_one() -> None:
    def work() -> tuple[str, str]:
        with_npu()
        start("hccl")
        dist.group.WORLD.bound_device_id = torch.device("npu", 3)
        return str(control_device()), str(payload_device())

    assert in_a_process(work) == ("npu:3", "npu:3")


def test_each_group_has_a_device_of_its_own() -> None:
    def work() -> list[str]:
        with_npu()
        start("hccl")
        group = dist.new_group([0], backend="gloo")
        return [str(device) for device in (control_device(), control_device(group), payload_device(group))]

    assert in_a_process(work) == ["npu:5", "cpu", "cpu"]


@pytest.mark.parametrize("kind", ["npu", "xpu"])
def test_other_accelerators_are_used_as_cuda_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is read into their memory, each byte once, and ranks communicate over it."""
    fixture = fixture_named("p10")
    monkeypatch.setenv(BACKENDS_VARIABLE, f"{kind}:collectives")

    def work() -> tuple[Any, ...]:
        if kind == "npu":
            with_npu()
            torch.npu.Event = torch.npu.device = None  # type: ignore[attr-defined]  # of the test device
        start("gloo")
        with device(kind) as counts, device_groups():
            checkpoint, is_equal = open_checkpoint(fixture.run), []
            for wanted in (checkpoint.tensor(WEIGHT, name) for name in checkpoint.names(WEIGHT)):
                part = Slice.whole((Region.whole(wanted.logical.name, wanted.shape),))
                read = read_slice(checkpoint, checkpoint.files.transfer, WEIGHT, part, allocate=allocated_on(kind))
                truth = fixture.truth[f"{WEIGHT}.{wanted.logical.name}"].reshape(-1)
                is_equal.append(read.device.type == kind and torch.equal(read.cpu(), truth))
            crossed = counts.to_device == sum(fixture.truth[name].nbytes for name in weights_in(fixture.truth))
            here = devices.accelerator_type(), devices.is_staged(torch.device(kind, 0)), str(payload_device())
            return all(is_equal), crossed, gather("long " * 100) == ["long " * 100], *here

    assert in_a_process(work) == (True, True, True, kind, True, f"{kind}:0")


def allocated_on(kind: str) -> Callable[[int, torch.dtype], torch.Tensor]:
    return lambda numel, dtype: torch.empty(numel, dtype=dtype, device=kind)


def weights_in(truth: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in truth if name.startswith(WEIGHT)]


def test_rocm_is_cuda_to_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its builds name their devices "cuda" and RCCL "nccl"; only the reported versions differ."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert devices.accelerator_type() == "cuda"
    assert default_backend("cuda") == "nccl"
    found = devices.driver_versions(tmp_path / "missing")
    assert found["ROCm"] == "6.4.43482" and "CUDA" not in found


@pytest.mark.parametrize("has_accelerator_module", [True, False])
def test_the_accelerator_is_found_in_every_release_of_torch(has_accelerator_module: bool) -> None:
    """`torch.accelerator` is of 2.6; before it, each kind of device has a module."""

    def work() -> tuple[str | None, str, bool]:
        with_npu()
        if not has_accelerator_module:
            del torch.accelerator
        else:
            torch.accelerator.is_available = lambda: True  # type: ignore[assignment]
            torch.accelerator.current_accelerator = lambda: torch.device("npu")  # type: ignore[assignment]
        return devices.accelerator_type(), str(devices.current_device("npu")), devices.is_staged(torch.device("npu", 5))

    assert in_a_process(work) == ("npu", "npu:5", False)


def test_without_accelerator_nothing_is_pinned_or_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerator_type", lambda: None)
    assert not devices.is_staged(CPU)
    assert not devices.is_staged(torch.device("cuda", 0))
    assert devices.host_buffer(8).numel() == devices.empty_on_host(torch.empty(8)).numel() == 8


def test_where_the_system_refuses_to_pin_memory_ordinary_memory_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "pins_memory", lambda: True)  # without a driver torch raises
    assert devices.host_buffer(8).device == devices.empty_on_host(torch.empty(8)).device == CPU


_NVRM = "NVRM version: NVIDIA UNIX {kind}  {version}  Wed Feb  5 01:23:45 UTC 2025\nGCC version:  gcc version 12.3.0\n"


@pytest.mark.parametrize(
    ("kind", "version"),
    [("x86_64 Kernel Module", "550.54.15"), ("Open Kernel Module for x86_64", "570.124.06"), ("nothing known", None)],
)
def test_the_driver_is_reported(kind: str, version: str | None, tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(_NVRM.format(kind=kind, version=version))
    assert devices.driver_versions(file).get("NVIDIA driver") == version


def test_versions_that_this_torch_does_not_have_are_left_out(tmp_path: Path) -> None:
    found = devices.driver_versions(tmp_path / "missing")
    assert "NVIDIA driver" not in found
    assert ("CUDA" in found, "ROCm" in found) == (torch.version.cuda is not None, torch.version.hip is not None)


def test_nccl_is_reported_as_torch_counts_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch._C, "_nccl_version", lambda: 2 << 32 | 27 << 16 | 5, raising=False)
    monkeypatch.setattr(torch._C, "_nccl_version_suffix", lambda: b"", raising=False)
    assert devices.driver_versions(tmp_path / "missing")["NCCL"] == "2.27.5"
