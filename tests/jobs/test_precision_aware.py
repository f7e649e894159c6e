"""Jobs of genuine Megatron-LM 0.19.2 with --use-precision-aware-optimizer, resumed under the same and other layouts.

The fused optimizer keeps masters as the int16 that bf16 weights lack. Stock looks at none of it when the option is
switched on or off: torch's loader copies remainders into fp32 masters, and masters into remainders, without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import assemble
from megatron_on_cpu.precision_aware import REMAINDERS_VARIABLE, split

from tests.harness.jobs import (
    LAST,
    OFF,
    SAVED,
    Job,
    assert_same_training_state,
    differing,
    resume,
    run_job,
    train_and_save,
)
from tests.harness.layouts import Layout
from tests.harness.models import LLAMA

LAYOUT = Layout(1, 2, 4)
AWARE = [*LLAMA, "--use-precision-aware-optimizer"]
REDUCED = [*AWARE, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "fp16"]
WHOLE = {REMAINDERS_VARIABLE: "0"}
PLUGIN = [launch.PRECISION_AWARE]


@pytest.fixture(scope="module")
def remainders(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Trained to the end, so that what comes after the checkpoint is known."""
    folder = tmp_path_factory.mktemp("remainders") / "job"
    return train_and_save(folder, LAYOUT, more=AWARE, plugins=PLUGIN, until=LAST)


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Plain Adam; with masters at exactly half of a step of bf16, whose remainder belongs to the weight above."""
    return train_and_save(tmp_path_factory.mktemp("masters") / "job", LAYOUT, more=LLAMA, until=LAST)


def test_stock_takes_remainders_for_masters(remainders: Job, folder: Path) -> None:
    """Why the package takes this load over although the layout is the same."""
    stock = run_job(folder, LAYOUT, load=remainders.run, more=LLAMA, environment=OFF, until=SAVED + 1)
    assert "successfully loaded checkpoint" in stock.output
    loaded = assemble(folder / "dump" / "after_load")
    assert loaded["fp32_param.output_layer.weight"].abs().max() > 1000


def test_under_the_same_layout_stock_resumes_what_it_wrote(remainders: Job, folder: Path) -> None:
    resumed = resume(folder, LAYOUT, remainders.run, more=AWARE, plugins=PLUGIN, until=LAST)
    assert resumed.losses == {number: loss for number, loss in remainders.losses.items() if number > SAVED}
    assert not any("optimizer resumed" in line for line in resumed.said)


@pytest.mark.parametrize(
    ("layout", "options", "environment"),
    [
        (Layout(2, 1, 4), AWARE, {}),
        (Layout(1, 1, 2), AWARE, WHOLE),
        (Layout(2, 2, 4), LLAMA, {}),
        (LAYOUT, LLAMA, {}),
    ],
    ids=["remainders, TP2", "whole masters, TP1 x PP1", "off, TP2 x PP2", "off, same layout"],
)
def test_remainders_under_another_layout_and_as_masters(
    remainders: Job, layout: Layout, options: Sequence[str], environment: dict[str, str], folder: Path
) -> None:
    resumed = resume(
        folder, layout, remainders.run, more=options, plugins=PLUGIN, environment=environment, until=LAST
    )
    assert_same_masters_and_moments(remainders, resumed)
    assert "joined from their weights and remainders" in resumed.output
    assert_losses_go_on(remainders, resumed)


@pytest.mark.parametrize("layout", [LAYOUT, Layout(2, 1, 4)], ids=["same layout", "TP2"])
def test_masters_become_remainders(masters: Job, layout: Layout, folder: Path) -> None:
    resumed = resume(folder, layout, masters.run, more=AWARE, plugins=PLUGIN, until=LAST)
    assert_same_masters_and_moments(masters, resumed)
    found = assemble(resumed.at_load)
    for name, master in found.items():
        if name.startswith("fp32_param."):
            weight = found[name.replace("fp32_param.", "weight.")]
            assert torch.equal(split(master.reshape(-1))[0].view(torch.int16), weight.reshape(-1).view(torch.int16))
    assert_losses_go_on(masters, resumed)


def test_reduced_moments_take_the_nearest_numbers_of_their_dtype(masters: Job, folder: Path) -> None:
    resumed = resume(folder, Layout(2, 1, 4), masters.run, more=REDUCED, plugins=PLUGIN, environment=WHOLE)
    expected, found = assemble(masters.at_save), assemble(resumed.at_load)
    kinds = {"exp_avg.": 2**-8, "exp_avg_sq.": 2**-10}
    for name, values in expected.items():
        for kind, step in kinds.items():
            if name.startswith(kind):
                assert not torch.equal(found[name], values)
                torch.testing.assert_close(found[name], values, rtol=step, atol=float(values.abs().max()) * 2**-14)
    kept = [name for name in expected if name.startswith(("weight.", "fp32_param."))]
    assert differing({name: expected[name] for name in kept}, {name: found[name] for name in kept}) == []


def assert_same_masters_and_moments(saved: Job, resumed: Job) -> None:
    """Bit for bit; of the weights, those that lie halfway between two numbers may have become the other one."""
    expected, found = assemble(saved.at_save), assemble(resumed.at_load)
    assert expected.keys() == found.keys()
    state = [name for name in expected if not name.startswith("weight.")]
    assert differing({name: expected[name] for name in state}, {name: found[name] for name in state}) == []
    assert_same_training_state(saved.at_save, resumed.at_load)


def assert_losses_go_on(saved: Job, resumed: Job) -> None:
    expected = {number: loss for number, loss in saved.losses.items() if number > SAVED}
    assert resumed.losses == pytest.approx(expected, rel=1e-4)
