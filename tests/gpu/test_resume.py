"""Test every format with every kind of optimizer on a real device, by genuine Megatron and the installed libraries."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu import toy_jobs

from tests.harness.cases import load_all
from tests.harness.checkpoints import fixture_named
from tests.harness.device_loads import FAST, LOADS, assert_is_the_truth, cases
from tests.harness.layouts import Layout

FP32_BYTES = 4
# Allocations are rounded up, and beside a parameter's masters lie those that are rounded and compared.
ROUNDED_UP, TEMPORARY = 512, 8
# Masters in the state of Transformer Engine's FusedAdam, or on the CPU.
NEEDS_ENGINE = {
    "offload of all", "offload of half", "remainders", "remainders as fully_reshardable", "moments in bf16",
}  # fmt: skip
NEEDS_MUON = {"Muon", "layer-wise Muon"}


def missing(name: str) -> str:
    """Return what is not installed and a load needs; empty where nothing is missing."""
    if name in NEEDS_ENGINE and find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    if name in NEEDS_MUON and find_spec("emerging_optimizers") is None:
        return "emerging-optimizers is not installed"
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> dict[str, dict[str, Any]]:
    """What one rank reports of each load."""
    names = [name for name in LOADS if not missing(name)]
    loads = cases(folder, FAST, names)
    outcomes = load_all(folder / "job", Layout(1, 1, 1), loads, on_gpus=True, devices=toy_jobs.GPU)
    return {name: rank for name, (rank,) in outcomes.items()}


@pytest.mark.parametrize("name", LOADS)
def test_the_state_is_that_of_the_job_that_wrote(name: str, loaded: dict[str, dict[str, Any]], folder: Path) -> None:
    if why := missing(name):
        pytest.skip(why)
    assert loaded[name]["error"] is None
    assert_is_the_truth(LOADS[name][0], folder / name)


@pytest.mark.parametrize("name", ["dp_reshardable", "fully_sharded_model_space", "legacy", "experts"])
def test_a_resume_needs_little_memory_of_the_device(
    name: str, loaded: dict[str, dict[str, Any]], figure: Callable[[str], None]
) -> None:
    """The masters that are read, which become the room of moments, and one parameter's temporaries."""
    memory, elements = loaded[name]["memory"], loaded[name]["elements"]
    figure(f"{name}: {memory}, {FP32_BYTES * elements} bytes of each kind")
    of_one_kind, tensors = FP32_BYTES * elements, len(fixture_named(LOADS[name][0]).truth)
    little = FP32_BYTES * TEMPORARY * loaded[name]["largest"] + ROUNDED_UP * tensors
    assert memory["prepare, device"] <= little
    assert memory["prove, device"] <= of_one_kind + little
    assert memory["fill, device"] <= of_one_kind + little
