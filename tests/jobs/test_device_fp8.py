"""Test loads of genuine Megatron-LM 0.19.2 into models in fp8, on a device that the CPU cannot access.

Transformer Engine's modules, recipes and tensors are genuine, and every linear weight is kept in fp8
(`--fp8-param-gather`): with a scale computed from its values, a delayed one, or one for each block. One rank resumes
what four stages of a job in bf16 saved, saves its fp8 weights as they are, and loads them again; two ranks resume that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron_on_cpu.dump_optimizer import assemble

from tests.harness.cases import Case, Outcomes, load_all
from tests.harness.checkpoints import fixture_named
from tests.harness.device_group import BACKENDS_VARIABLE
from tests.harness.jobs import differing
from tests.harness.layouts import Layout
from tests.harness.models import LLAMA
from tests.harness.packages import with_transformer_engine

pytestmark = pytest.mark.nightly

SCRIPT, SAVES_TO, SAVE = "device_cases.py", "TEST_SAVES_TO", "save"
FIXTURE, VOCABULARY = "p21", 256
MODEL = [*LLAMA, "--add-qkv-bias", "--qk-layernorm", "--transformer-impl", "transformer_engine", "--clip-grad", "0"]
FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "tensorwise", "--fp8-param-gather"]
RECIPES = ("tensorwise", "delayed", "blockwise")
BACKENDS = {BACKENDS_VARIABLE: "cpu:gloo,cuda:nccl"}
FP32_BYTES, BLOCK = 4, 128


def quantized(weight: torch.Tensor, recipe: str) -> torch.Tensor:
    """Return the values of a weight in fp8. Whoever has not trained has no history for a delayed scale."""
    largest, values = torch.finfo(torch.float8_e4m3fn).max, weight.float()
    if recipe == "blockwise":
        assert max(weight.shape) <= BLOCK  # one block
    scale = torch.ones(()) if recipe == "delayed" else largest / values.abs().max()
    scale = torch.exp2(torch.floor(torch.log2(scale))) if recipe == "blockwise" else scale
    return ((values * scale).to(torch.float8_e4m3fn).float() * (1 / scale)).to(weight.dtype)


def in_fp8(name: str) -> bool:
    return name.startswith("weight.") and ".linear_" in name and name.endswith(".weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8")


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        with_transformer_engine(patch)
        yield


def loads(folder: Path, layout: Layout, cases: list[Case]) -> Outcomes:
    return load_all(folder / str(layout), layout, cases, script=SCRIPT, more=[*MODEL, *FP8])


@pytest.fixture(scope="module")
def one(folder: Path) -> Outcomes:
    """What one rank reports: of each recipe, a load under another layout, and then one of what it has saved."""
    found = []
    for recipe in RECIPES:
        model, saved = {"fp8_recipe": recipe}, folder / "saved" / recipe
        saves = {**BACKENDS, SAVES_TO: str(saved)}
        found.append(Case(recipe, fixture_named(FIXTURE).run, {}, saves, model, folder / recipe))
        found.append(Case(f"{recipe} again", saved / SAVE, {}, BACKENDS, model, folder / f"{recipe} again"))
    return loads(folder, Layout(1, 1, 1, vocabulary=VOCABULARY), found)


@pytest.fixture(scope="module")
def two(folder: Path, one: Outcomes) -> Outcomes:
    """What each of two ranks reports of loads of what the one has saved."""
    found = [
        Case(recipe, folder / "saved" / recipe / SAVE, {}, BACKENDS, {"fp8_recipe": recipe}, folder / f"{recipe}, TP2")
        for recipe in RECIPES
    ]
    return loads(folder, Layout(2, 1, 2, vocabulary=VOCABULARY), found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_job_in_bf16_is_resumed_in_fp8(recipe: str, one: Outcomes, folder: Path) -> None:
    """Masters and moments are those of the job that wrote, weights are their values in fp8; each crosses once."""
    (rank,) = one[recipe]
    assert (rank["error"], rank["resumes"]) == (None, 1)
    truth = fixture_named(FIXTURE).truth
    weights = {name: quantized(values, recipe) for name, values in truth.items() if in_fp8(name)}
    assert len(weights) == 4 * 4 and differing(weights, {name: truth[name] for name in weights}) == sorted(weights)
    assert differing({**truth, **weights}, assemble(folder / recipe)) == []
    assert rank["held"]["cpu"] == 0
    phases, of_one_kind = rank["crossed"], FP32_BYTES * rank["held"]["cuda"]
    # To know how near a master has to be, the scale of a weight is looked at; blocks have none that is theirs alone.
    looks = 0 if recipe == "blockwise" else len(weights)
    assert phases["prepare"] == dict.fromkeys(phases["prepare"], 0) | {"waits": looks}
    assert [phases[phase]["to_device"] for phase in ("prove", "fill")] == [of_one_kind, 2 * of_one_kind]
    assert [phases[phase]["to_cpu"] for phase in ("prove", "fill")] == [0, 0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_are_saved_in_fp8_are_loaded_again(recipe: str, one: Outcomes, folder: Path) -> None:
    (rank,) = one[f"{recipe} again"]
    assert rank["error"] is None
    assert differing(assemble(folder / recipe), assemble(folder / f"{recipe} again")) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_are_saved_in_fp8_are_loaded_under_another_layout(
    recipe: str, two: Outcomes, folder: Path
) -> None:
    """Each rank has a scale of its own, so weights are quantized once more; all else is equal."""
    assert [(rank["error"], rank["resumes"]) for rank in two[recipe]] == [(None, 1), (None, 1)]
    saved, found = assemble(folder / recipe), assemble(folder / f"{recipe}, TP2")
    assert all(map(in_fp8, differing(saved, found)))
    for rank in two[recipe]:
        of_one_kind = FP32_BYTES * rank["held"]["cuda"]
        assert [rank["crossed"][phase]["to_device"] for phase in ("prove", "fill")] == [of_one_kind, 2 * of_one_kind]
        assert [rank["crossed"][phase]["to_cpu"] for phase in ("prepare", "prove", "fill")] == [0, 0, 0]
