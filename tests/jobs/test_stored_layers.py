"""Resume checkpoints whose layers are stacked in a model that keeps each by itself, and the other way round.

The same model has either form: `--moe-layer-freq` as a list says what the default says, and stores other keys.
"""

from __future__ import annotations

import pytest
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext.settings import LOAD
from tests.harness.checkouts import EITHER
from tests.harness.jobs import SAVED, assert_same_optimizer, assert_same_training_state, differing
from tests.harness.layouts import experts_over
from tests.harness.models import GATED_EXPERTS
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.thorough

HOMOGENEOUS = [*GATED_EXPERTS]
LISTED = [*GATED_EXPERTS, "--moe-layer-freq", "([1]*4)"]
FORMS = {"stacked": HOMOGENEOUS, "listed": LISTED}
OTHER = {"stacked": "listed", "listed": "stacked"}
SAVING = experts_over(1, 2, 2, 1)
MOVED = experts_over(1, 1, 2, 2)
PORTABLE = ["--dist-ckpt-optim-fully-reshardable"]
WAYS = {"by Megatron": (SAVING, {LOAD.name: "stock"}), "fast, moved": (MOVED, {LOAD.name: "fast"})}
WEIGHTS = ["--no-load-optim", "--no-load-rng"]
NOTE = {
    "stacked": "the layers are stored in stacked arrays, and this model keeps each by itself",
    "listed": "each layer is stored by itself, and this model stacks its layers",
}


@pytest.fixture(scope="module", params=EITHER)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Each form loaded into the other model."""
    folder = tmp_path_factory.mktemp("forms")
    turns = [Turn(folder / form, SAVING, saves=True, more=model) for form, model in FORMS.items()]
    turns.append(Turn(folder / "portable", SAVING, saves=True, more=[*HOMOGENEOUS, *PORTABLE]))
    for form in FORMS:
        model, load = FORMS[OTHER[form]], folder / form / "checkpoints"
        turns += [
            Turn(folder / f"{form}, {way}", layout, load=load, more=model, environment=environment)
            for way, (layout, environment) in WAYS.items()
        ]
        turns.append(Turn(folder / f"{form}, weights", MOVED, load=load, more=[*model, *WEIGHTS]))
    portable = folder / "portable" / "checkpoints"
    strict = ["--dist-ckpt-strictness", "raise_unexpected"]
    turns.append(Turn(folder / "portable, moved", MOVED, load=portable, more=LISTED))
    turns.append(Turn(folder / "strict", SAVING, load=portable, more=[*LISTED, *strict]))
    return run_in_turn(folder, turns, of_checkout=request.param)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_either_form_is_loaded_into_either_model(form: str, way: str, results: Results) -> None:
    saved, loaded = results.job(form), results.job(f"{form}, {way}")
    assert_same_optimizer(saved.at_save, loaded.at_load)
    if loaded.layout == saved.layout:  # experts over several ranks have parameter groups of their own
        assert_same_training_state(saved.at_save, loaded.at_load)
    assert list(loaded.losses) == [SAVED + 1]
    assert len([line for line in loaded.said if NOTE[form] in line]) == 1


@pytest.mark.parametrize("form", FORMS)
def test_weights_alone_are_loaded_into_either_model(form: str, results: Results) -> None:
    at_save, at_load = (assemble(job) for job in (results.job(form).at_save, results.job(f"{form}, weights").at_load))
    expected = {name: tensor for name, tensor in at_save.items() if name.startswith("weight.")}
    assert differing(expected, {name: at_load[name] for name in expected}) == []


@pytest.mark.parametrize("name", ["portable, moved", "strict"])
def test_optimizers_that_megatron_loads_itself(name: str, results: Results) -> None:
    """Their state is requested by the names of parameters, which are translated with those of the weights."""
    saved, loaded = results.job("portable"), results.job(name)
    assert_same_optimizer(saved.at_save, loaded.at_load)
    # With experts over several ranks the job has another number of optimizers, which this package fills.
    assert ("optimizer resumed" in loaded.output) == (name == "portable, moved")
