"""Test checkpoints saved before the optimizer's first step, which fp16 delays until the loss scale fits.

They hold masters and no moments. Stock Megatron saves them in torch_dist, and fails to load them.
"""

from __future__ import annotations

from typing import Any

import pytest
from megatron_on_cpu.dump_optimizer import assemble, parameter_settings, training_state

from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.metadata_comparison import MetadataComparison
from tests.harness.checkouts import EITHER, full_version
from tests.harness.jobs import LAST, LEGACY, SAVED, Job, differing
from tests.harness.layouts import Layout
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

# Halved from the second iteration on, the scale fits after the fourth, whose checkpoint is of no step.
FP16 = ["--fp16", "--initial-loss-scale", str(2**22), "--hysteresis", "1"]
WRITTEN, OTHER = Layout(1, 2, 4), Layout(2, 1, 4)
SAVES: dict[str, dict[str, Any]] = {
    "distributed": {},
    "whole": {"optimizer": ()},
    "whole, legacy": {"optimizer": (), "more": LEGACY},
}
LOADS = {"same": WRITTEN, "other": OTHER}
LEFT_TO_STOCK = ("whole, legacy", "same")
CONVERTED = ("distributed", "whole")


@pytest.fixture(scope="module", params=EITHER)
def turns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("first_step")
    version = ["--megatron-version", full_version()] if request.param else []
    found = [Turn(folder / name, WRITTEN, saves=True, until=LAST, precision=FP16, **how) for name, how in SAVES.items()]

    def load(name: str, run: str, layout: Layout, **turn: Any) -> Turn:
        options = {**SAVES[name], "precision": FP16, "until": LAST}
        return Turn(folder / f"{name}, {run}", layout, **{"load": folder / name / "checkpoints", **options, **turn})

    found += [load(name, "stock", WRITTEN, stock=True) for name in SAVES]
    for name in CONVERTED:
        out = folder / f"{name}, converted"
        command = ["convert", folder / name / "checkpoints", out, "--to", "torch_dist", *version]
        more = ["--dist-ckpt-optim-fully-reshardable"] if name == "distributed" else []
        found.append(load(name, "of stock", OTHER, stock=True, load=out, commands=[command], more=more))
    found += [load(name, run, layout) for name in SAVES for run, layout in LOADS.items()]
    return run_in_turn(folder, found, of_checkout=request.param)


def assert_goes_on(saved: Job, loaded: Job) -> None:
    """Masters are the same bits, moments are zero or not there, the step and the schedule begin, the scaler goes on."""
    before, after = assemble(saved.at_save), assemble(loaded.at_load)
    assert {name.partition(".")[0] for name in before} == {"weight", "fp32_param"}
    assert differing(before, {name: after[name] for name in before}) == []
    assert not any(tensor.any() for name, tensor in after.items() if name not in before)
    assert training_state(saved.at_save) == training_state(loaded.at_load)
    assert {settings.get("step", 0) for settings in parameter_settings(loaded.at_load).values()} == {0}
    assert list(loaded.losses) == list(range(SAVED + 1, LAST + 1))
    assert loaded.losses == pytest.approx({key: saved.losses[key] for key in loaded.losses}, rel=1e-4)
    # Steps were made: no loss before them is as low. The loss of one iteration depends on its data, too.
    assert min(loaded.losses.values()) < min(saved.losses[iteration] for iteration in range(1, SAVED + 1))


@pytest.mark.parametrize("name", SAVES)
def test_stock_ends_under_the_layout_that_it_saved(name: str, turns: Results) -> None:
    stock = turns[f"{name}, stock"]
    if (name, "same") == LEFT_TO_STOCK:
        assert stock.returncode == 0
    else:
        assert stock.returncode != 0
        assert "KeyError" in stock.output
        assert "exp_avg" in stock.output


@pytest.mark.parametrize("layout", LOADS)
@pytest.mark.parametrize("name", SAVES)
def test_it_is_resumed(name: str, layout: str, turns: Results) -> None:
    loaded = turns.job(f"{name}, {layout}")
    assert_goes_on(turns.job(name), loaded)
    assert any("optimizer resumed from" in line for line in loaded.said) != ((name, layout) == LEFT_TO_STOCK)


@pytest.mark.parametrize("name", CONVERTED)
def test_stock_resumes_it_once_converted(name: str, turns: Results) -> None:
    assert_goes_on(turns.job(name), turns.job(f"{name}, of stock"))
    converted = turns.folder(name).with_name(f"{name}, converted")
    comparison = compare(turns.job(name).run, converted)
    assert comparison.equal
    assert MetadataComparison("moments", "zero: saved before the first step", "stored") in comparison.facts
