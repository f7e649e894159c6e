"""Test loads of genuine Megatron-LM 0.19.2 with model and optimizer on a device that the CPU cannot access.

One rank loads every format into every kind of optimizer. Two ranks, whose groups only use the device's memory, share
their reads, and agree on an error if one of them runs out of memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu import launch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.sidecar_file import find_sidecar
from mcore_ckpt_ext.layout.additive_digest import digest_tensor, format_digest
from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER
from mcore_ckpt_ext.operations.iteration_health import problems_of
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from tests.harness.cases import Case, Outcomes, load_all
from tests.harness.checkpoints import everything_in, fixture_named
from tests.harness.device_group import BACKENDS_VARIABLE
from tests.harness.device_loads import AWARE, BY_STOCK, FAST, LOADS, TWO_LAYERS, assert_is_the_truth, cases
from tests.harness.jobs import RANK_SCRIPTS, TIME_LIMIT, differing, with_vocabulary
from tests.harness.layouts import VOCABULARY, Layout
from tests.harness.packages import with_transformer_engine

pytestmark = pytest.mark.nightly

SCRIPT = "device_cases.py"
SAVES_TO = "TEST_SAVES_TO"
ITERATION = "iter_0000004"
SAVE, SAVE_IN_BACKGROUND = "save", "save in the background"
# With plain masters, with remainders that are digested, and with half of the masters on the CPU.
SAVED = ("dp_reshardable", "remainders", "offload of half")
ONCE = {**FAST, "MCORE_CKPT_EXT_READ_ONCE": "1"}
NUMBERS_ON_THE_CPU = {BACKENDS_VARIABLE: "cpu:gloo,cuda:nccl"}
OUT_OF_MEMORY = "TEST_OUT_OF_MEMORY"
NO_MEMORY_TO_SAVE = "no memory to save"
WHOLE = "load"
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
FP32_BYTES, BF16_BYTES = 4, 2
# For each copy: until a block is free again, until its elements are there, and until they are compared.
WAITS = 6
# In a save: what Megatron counts and compares of its own.
FEW_BYTES, FEW_WAITS = 512, 8


def saved_by(folder: Path, name: str) -> Path:
    """Where what was loaded is saved, in a folder for each way."""
    return folder / "saved" / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> dict[str, dict[str, Any]]:
    """What one rank reports of each load; what is loaded in some of them, it saves."""
    saves = {name: {SAVES_TO: str(saved_by(folder, name))} for name in SAVED}
    loads = [
        replace(case, environment={**case.environment, **saves.get(case.name, {})})
        for case in cases(folder, {**FAST, **NUMBERS_ON_THE_CPU})
    ]
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
def test_stored_tensors_are_copied_to_the_device_once(name: str, loaded: dict[str, dict[str, Any]]) -> None:
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
    expected = {name: format_digest(digest_tensor(values.reshape(-1))) for name, values in kept.items()}
    assert loaded["remainders"]["digests"] == expected != {}
    assert loaded["dp_reshardable"]["digests"] == {}


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("how", [SAVE, SAVE_IN_BACKGROUND])
def test_a_save_is_what_lies_on_the_device(
    name: str, how: str, loaded: dict[str, dict[str, Any]], folder: Path
) -> None:
    """With its sidecar, complete, and what is stored crosses once: nothing else is read on the CPU."""
    run, fixture = saved_by(folder, name) / how, fixture_named(LOADS[name][0])
    iteration = run / ITERATION
    assert problems_of(iteration) == ()
    assert find_sidecar(FolderIndex(iteration)).sidecar is not None
    found = everything_in(open_checkpoint(run))
    assert differing(*(with_vocabulary(one, VOCABULARY) for one in (fixture.truth, found))) == []
    stored = sum(
        entry.size.numel() * entry.properties.dtype.itemsize
        for entry in FileSystemReader(iteration).read_metadata().state_dict_metadata.values()
        if isinstance(entry, TensorStorageMetadata)
    )
    crossed = loaded[name]["crossed"][how]
    assert crossed["to_cpu"] <= stored + FEW_BYTES
    assert crossed["to_device"] <= FEW_BYTES
    assert crossed["waits"] <= crossed["copies"] + FEW_WAITS


@pytest.fixture(scope="module")
def shared(folder: Path) -> Outcomes:
    """What each of two ranks reports, of groups that take memory of the device alone, or for numbers the CPU's too."""
    remainders, saves = fixture_named(LOADS["remainders"][0]), saved_by(folder, NO_MEMORY_TO_SAVE)
    loads = [
        Case("read once", fixture_named("p10").run, {}, ONCE, {}, folder / "read once"),
        Case("both backends", fixture_named("p10").run, {}, {**ONCE, **NUMBERS_ON_THE_CPU}, {}, folder / "both"),
        Case(OUT_OF_MEMORY, fixture_named("p12").run, {}, {**ONCE, OUT_OF_MEMORY: "1"}, TWO_LAYERS),
        Case(NO_MEMORY_TO_SAVE, remainders.run, {}, {**FAST, OUT_OF_MEMORY: "1", SAVES_TO: str(saves)}, AWARE),
    ]
    return load_all(folder / "two", Layout(1, 1, 2), loads, script=SCRIPT, plugins=[launch.PRECISION_AWARE])


@pytest.mark.parametrize(("name", "dump"), [("read once", "read once"), ("both backends", "both")])
def test_ranks_share_what_they_read_over_the_device(name: str, dump: str, shared: Outcomes, folder: Path) -> None:
    assert [rank["error"] for rank in shared[name]] == [None, None]
    assert_is_the_truth("p10", folder / dump)


def test_each_element_is_copied_to_the_device_by_one_rank(shared: Outcomes) -> None:
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
            # Rank 0 reports it for all, and so does the rank that could not check.
            reported = "this load is not verified: rank 1: OutOfMemoryError"
            assert any(line.startswith(reported) for line in ranks[0]["lines"])
            assert any(line.startswith(f"on this rank: {reported}") for line in ranks[1]["lines"])
            continue
        for one in ranks:
            assert "rank 1: OutOfMemoryError: CUDA out of memory" in one["error"]
            assert "ResumeRefusedError" in one["types"]
        unchanged = all(one["before"] == one["after"] for one in ranks)
        assert unchanged or all("do not train on" in one["error"] for one in ranks)


def test_a_save_without_memory_is_complete_all_the_same(shared: Outcomes) -> None:
    """What this package allocates in a save are digests: where a rank has no memory for them, there are none."""
    truth, digested = fixture_named(LOADS["remainders"][0]).truth, list[bool]()
    (folders,) = {tuple(rank["saved"]) for rank in shared[NO_MEMORY_TO_SAVE]}
    for iteration in (Path(folder) / ITERATION for folder in folders):
        assert problems_of(iteration) == ()
        found = everything_in(open_checkpoint(iteration))
        assert differing(*(with_vocabulary(one, VOCABULARY) for one in (truth, found))) == []
        sidecar = find_sidecar(FolderIndex(iteration)).sidecar
        assert sidecar is not None
        digested.append(bool(sidecar.digests))
    assert digested == [False] * (len(folders) - 1) + [True]
    assert len(folders) > 2


def test_masters_of_fp8_weights_are_compared_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Transformer Engine's classes for one scale and for a scale for each block; nothing is copied to the CPU."""
    with_transformer_engine(monkeypatch)
    command = [sys.executable, "-W", "ignore", str(RANK_SCRIPTS / "device_float8.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    found = {"device": "cuda:0", "right": True, "wrong": 70_000, "to_cpu": 0}
    assert json.loads(done.stdout) == {
        "tensorwise": {"class": "Float8Tensor", **found},
        "blockwise": {"class": "Float8BlockwiseQTensor", **found},
    }
