"""Test loads of genuine Megatron-LM 0.19.2 with model and optimizer on a device that the CPU cannot access.

One rank loads every format into every kind of optimizer. Two ranks, whose groups only use the device's memory, share
their reads, and agree on an error if one of them runs out of memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu import launch

from mcore_ckpt_ext.layout.additive_checksum import digest_of, written
from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER
from tests.harness.cases import Case, Outcomes, load_all
from tests.harness.checkpoints import fixture_named
from tests.harness.device_group import BACKENDS_VARIABLE
from tests.harness.device_loads import BY_STOCK, FAST, LOADS, TWO_LAYERS, assert_is_the_truth, cases
from tests.harness.layouts import Layout

SCRIPT = "device_cases.py"
ONCE = {**FAST, "MCORE_CKPT_EXT_READ_ONCE": "1"}
NUMBERS_ON_THE_CPU = {BACKENDS_VARIABLE: "cpu:gloo,cuda:nccl"}
OUT_OF_MEMORY = "TEST_OUT_OF_MEMORY"
WHOLE = "load"
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
FP32_BYTES, BF16_BYTES = 4, 2
# For each copy: until a block is free again, until its elements are there, and until they are compared.
WAITS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> dict[str, dict[str, Any]]:
    """What one rank reports of each load."""
    loads = cases(folder, {**FAST, **NUMBERS_ON_THE_CPU})
    outcomes = load_all(folder / "one", Layout(1, 1, 1), loads, script=SCRIPT, plugins=[launch.PRECISION_AWARE])
    return {name: rank for name, (rank,) in outcomes.items()}


@pytest.mark.parametrize("name", LOADS)
def test_the_state_on_the_device_is_that_of_the_job_that_wrote(
    name: str, loaded: dict[str, dict[str, Any]], folder: Path
) -> None:
    assert loaded[name]["error"] is None
    assert loaded[name]["resumes"] == (name not in BY_STOCK)
    assert_is_the_truth(LOADS[name][0], folder / name)


@pytest.mark.parametrize("name", LOADS)
def test_what_is_stored_crosses_once(name: str, loaded: dict[str, dict[str, Any]]) -> None:
    """Masters and moments go to the device; of weights, what masters on the CPU are compared with comes back."""
    phases, held = loaded[name]["crossed"], loaded[name]["held"]
    assert phases[WHOLE]["waits"] <= WAITS * phases[WHOLE]["copies"]
    if name in BY_STOCK:
        assert phases[WHOLE]["to_device"] <= loaded[name]["fast"]
        return
    assert phases["prepare"] == dict.fromkeys(phases["prepare"], 0)
    kinds = {key.partition(".")[0] for key in fixture_named(LOADS[name][0]).truth} & set(MOMENTS)
    assert phases["prove"]["to_device"] == FP32_BYTES * held["cuda"]
    assert phases["fill"]["to_device"] == FP32_BYTES * held["cuda"] * len(kinds)
    assert phases["prove"]["to_cpu"] == BF16_BYTES * held["cpu"]
    assert phases["fill"]["to_cpu"] == 0


def test_digests_of_remainders_are_taken_on_the_device(loaded: dict[str, dict[str, Any]]) -> None:
    truth = fixture_named(LOADS["remainders"][0]).truth
    kept = {key.partition(".")[2]: values for key, values in truth.items() if key.startswith(PARAM_REMAINDER)}
    expected = {name: written(digest_of(values.reshape(-1))) for name, values in kept.items()}
    assert loaded["remainders"]["digests"] == expected != {}
    assert loaded["dp_reshardable"]["digests"] == {}


@pytest.fixture(scope="module")
def shared(folder: Path) -> Outcomes:
    """What each of two ranks reports, of groups that take memory of the device alone, or for numbers the CPU's too."""
    loads = [
        Case("read once", fixture_named("p10").run, {}, ONCE, {}, folder / "read once"),
        Case("both backends", fixture_named("p10").run, {}, {**ONCE, **NUMBERS_ON_THE_CPU}, {}, folder / "both"),
        Case(OUT_OF_MEMORY, fixture_named("p12").run, {}, {**ONCE, OUT_OF_MEMORY: "1"}, TWO_LAYERS),
    ]
    return load_all(folder / "two", Layout(1, 1, 2), loads, script=SCRIPT)


@pytest.mark.parametrize(("name", "dump"), [("read once", "read once"), ("both backends", "both")])
def test_ranks_share_what_they_read_over_the_device(name: str, dump: str, shared: Outcomes, folder: Path) -> None:
    assert [rank["error"] for rank in shared[name]] == [None, None]
    assert_is_the_truth("p10", folder / dump)


def test_what_another_rank_has_read_crosses_in_one_process(shared: Outcomes) -> None:
    first, second = (rank["crossed"][WHOLE]["to_device"] for rank in shared["both backends"])
    elements = sum(rank["held"]["cuda"] for rank in shared["both backends"])
    assert first + second == (BF16_BYTES + 3 * FP32_BYTES) * elements


def test_a_rank_without_memory_is_heard_by_all(shared: Outcomes) -> None:
    """Wherever it is: all ranks refuse alike, and their optimizers are unchanged, or they say what they are."""
    attempts = list(zip(*(rank["attempts"] for rank in shared[OUT_OF_MEMORY]), strict=True))
    assert [one["error"] for one in attempts.pop()] == [None, None]
    assert len(attempts) >= 8
    for ranks in attempts:
        if ranks[0]["error"] is None:  # the optimizer is filled, and cannot be looked at once more
            assert any("this load is not verified: rank 1: OutOfMemoryError" in line for line in ranks[0]["lines"])
            continue
        for one in ranks:
            assert "rank 1: OutOfMemoryError: CUDA out of memory" in one["error"]
            assert "ResumeRefusedError" in one["types"]
        unchanged = all(one["before"] == one["after"] for one in ranks)
        assert unchanged or all("do not train on" in one["error"] for one in ranks)
