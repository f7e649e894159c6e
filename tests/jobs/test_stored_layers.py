"""Resume checkpoints whose layers are stacked in a model that keeps each by itself, and the other way round.

The same model has either form: `--moe-layer-freq` as a list says what the default says, and stores other keys, and so
does a configuration of layers that differ if all of them are alike.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext.settings import LOAD
from tests.harness.checkouts import EITHER, version
from tests.harness.jobs import SAVED, assert_same_optimizer, assert_same_training_state, differing
from tests.harness.layouts import Layout, experts_over
from tests.harness.models import GATED_EXPERTS, LLAMA
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = [pytest.mark.thorough, pytest.mark.nightly]

OTHER = {"stacked": "by themselves", "by themselves": "stacked"}
PORTABLE = ["--dist-ckpt-optim-fully-reshardable"]
WEIGHTS = ["--no-load-optim", "--no-load-rng"]
NOTE = {
    "stacked": "the layers are stored in stacked arrays, and this model keeps each by itself",
    "by themselves": "each layer is stored by itself, and this model stacks its layers",
}


class Model(NamedTuple):
    """A model, the arguments with which Megatron stores each of its layers by itself, and two layouts."""

    stacked: list[str]
    differing: list[str]
    saving: Layout
    moved: Layout

    def arguments(self, form: str) -> list[str]:
        return self.stacked if form == "stacked" else [*self.stacked, *self.differing]


# The configuration of layers that differ, of layers that are alike. Megatron compares it with the flags
# (`validate_model_config_args_from_heterogeneous_config`, megatron/training/arguments.py, core_v0.13.0 to 0.19.2).
LAYERS = {
    "hidden_act": "silu", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "rope_theta": 500000,
    "rope_scaling": {"factor": 8.0}, "tie_word_embeddings": False,
    "block_configs": [{"attention": {"n_heads_in_group": 2}, "mlp": {"ffn_hidden_size": 64}}] * 4,
}  # fmt: skip
ROTARY = ["--rotary-base", "500000", "--use-rope-scaling", "--use-rotary-position-embeddings"]
FREQUENCY = ["--moe-layer-freq", "([1]*4)"]
# A layer of multi-token prediction has keys of its own in either form. The development head of August 2026 builds none
# without Transformer Engine (`is_inference_column_parallel_linear`, megatron/core/tensor_parallel/inference_layers.py).
PREDICTING_EXPERTS = GATED_EXPERTS if version() == "0.20" else [*GATED_EXPERTS, "--mtp-num-layers", "1"]


@pytest.fixture(scope="module", params=["frequency", "heterogeneous"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if request.param == "frequency":
        return Model(PREDICTING_EXPERTS, FREQUENCY, experts_over(1, 2, 2, 1), experts_over(1, 1, 2, 2))
    file = tmp_path_factory.mktemp("model") / "layers.json"
    file.write_text(json.dumps(LAYERS))
    alike = ["--heterogeneous-layers-config-path", str(file)]
    return Model([*LLAMA, *ROTARY], alike, Layout(1, 2, 2), Layout(2, 1, 2))


@pytest.fixture(scope="module", params=EITHER)
def results(request: pytest.FixtureRequest, model: Model, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Each form loaded into the other model."""
    folder = tmp_path_factory.mktemp("forms")
    portable = folder / "portable" / "checkpoints"
    by_themselves = model.arguments("by themselves")
    turns = [Turn(folder / form, model.saving, saves=True, more=model.arguments(form)) for form in OTHER]
    turns.append(Turn(folder / "portable", model.saving, saves=True, more=[*model.stacked, *PORTABLE]))
    for form, other in OTHER.items():
        more, load = model.arguments(other), folder / form / "checkpoints"
        turns += [
            Turn(folder / f"{form}, {way}", layout, load=load, more=more, environment={LOAD.name: loader})
            for way, layout, loader in (("by Megatron", model.saving, "stock"), ("fast, moved", model.moved, "fast"))
        ]
        turns.append(Turn(folder / f"{form}, weights", model.moved, load=load, more=[*more, *WEIGHTS]))
    strict = ["--dist-ckpt-strictness", "raise_unexpected"]
    turns.append(Turn(folder / "portable, moved", model.moved, load=portable, more=by_themselves))
    turns.append(Turn(folder / "strict", model.saving, load=portable, more=[*by_themselves, *strict]))
    return run_in_turn(folder, turns, of_checkout=request.param)


@pytest.mark.parametrize("way", ["by Megatron", "fast, moved"])
@pytest.mark.parametrize("form", OTHER)
def test_either_form_is_loaded_into_either_model(form: str, way: str, results: Results) -> None:
    saved, loaded = results.job(form), results.job(f"{form}, {way}")
    assert_same_optimizer(saved.at_save, loaded.at_load)
    if loaded.layout == saved.layout:  # experts over several ranks have parameter groups of their own
        assert_same_training_state(saved.at_save, loaded.at_load)
    assert list(loaded.losses) == [SAVED + 1]
    assert len([line for line in loaded.said if NOTE[form] in line]) == 1


@pytest.mark.parametrize("form", OTHER)
def test_weights_alone_are_loaded_into_either_model(form: str, results: Results) -> None:
    at_save, at_load = (assemble(job) for job in (results.job(form).at_save, results.job(f"{form}, weights").at_load))
    expected = {name: tensor for name, tensor in at_save.items() if name.startswith("weight.")}
    assert differing(expected, {name: at_load[name] for name in expected}) == []


@pytest.mark.parametrize("name", ["portable, moved", "strict"])
def test_optimizers_that_megatron_loads_itself(name: str, model: Model, results: Results) -> None:
    """Their state is requested by the names of parameters, which are translated with those of the weights."""
    saved, loaded = results.job("portable"), results.job(name)
    assert_same_optimizer(saved.at_save, loaded.at_load)
    # With experts over several ranks the job has another number of optimizers, which this package fills.
    is_refilled = name == "portable, moved" and model.stacked == PREDICTING_EXPERTS
    assert ("optimizer resumed" in loaded.output) == is_refilled
