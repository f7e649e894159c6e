"""Test models of genuine Megatron Core other than plain GPT, with the local spec: saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext import TorchDist
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.layout.sidecar import FILE_NAME
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.layout_plan import plan
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.jobs import RANK_SCRIPTS, assert_same_optimizer
from tests.harness.programs import Programs

pytestmark = pytest.mark.nightly

ITERATION = "iter_0000004"
PROGRAM = RANK_SCRIPTS / "other_models.py"
# What wrote it, and what goes on from there: tensor and pipeline parallel size. T5 and MIMO have one stage
# (pretrain_t5.py; without grids of their own, MIMO's towers would stand on every stage).
MODELS = {"bert": ((1, 4), (2, 2)), "t5": ((2, 1), (4, 1)), "llava": ((2, 2), (1, 4)), "mimo": ((4, 1), (2, 1))}
# A sidecar is the same for all; of the others each has shown what it asks a checkpoint for.
WAYS = [("bert", "with a sidecar"), *((model, way) for model in MODELS for way in ("without one", "legacy"))]
WAYS += [("bert", "torch_dist"), ("t5", "torch_dist")]


def places(turns: Programs, model: str) -> list[Path]:
    """Where a model is saved, and what is converted of it."""
    folder = turns.place(model)
    return [folder / "saved", folder / "legacy", folder / "torch_dist"]


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Each model, resumed by the hooks; and what is converted of it, without a sidecar, resumed by stock Megatron."""
    found = Programs(tmp_path_factory.mktemp("models"))
    for model, (written, running) in MODELS.items():
        folder, legacy, back = places(found, model)
        sizes = ["--tensor-model-parallel-size", running[0], "--pipeline-model-parallel-size", running[1]]
        to_legacy = ["convert", folder, legacy, "--to", "legacy", *sizes]
        to_torch_dist = ["convert", legacy, back, "--to", "torch_dist"]
        ways: dict[str, tuple[Path, dict[str, Any]]] = {
            "with a sidecar": (folder, {}),
            "without one": (folder, {"without": [folder / FILE_NAME]}),
            "legacy": (legacy / ITERATION, {"stock": True, "commands": [to_legacy]}),
            "torch_dist": (back / ITERATION, {"stock": True, "commands": [to_torch_dist]}),
        }
        found.add(model, PROGRAM, model, *written, "none", folder)
        for way, (place, how) in ways.items():
            if (model, way) in WAYS:
                found.add(f"{model}, {way}", PROGRAM, model, *running, place, "none", **how)
    found.run()
    return found


@pytest.mark.parametrize(("model", "way"), WAYS)
def test_a_model_is_resumed_under_another_layout(turns: Programs, model: str, way: str) -> None:
    assert_same_optimizer(turns.dump(model), turns.dump(f"{model}, {way}"))


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_known_offline(turns: Programs, model: str) -> None:
    saved, *converted = places(turns, model)
    if not converted[-1].exists():
        convert(converted[0], converted[-1], TorchDist())
    tensor, pipeline = MODELS[model][0]
    assert inspect(saved).layout_text == f"TP{tensor} x PP{pipeline} x DP{4 // (tensor * pipeline)}"
    assert all(verify(place).sound for place in (saved, *converted))
    assert all(compare(saved, place).equal for place in converted)


def test_layouts_are_planned_for_one_stack_of_layers_alone(turns: Programs) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="one stack; found: decoder and encoder"):
        plan(places(turns, "t5")[0], gpus=4)
