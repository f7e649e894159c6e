"""Jobs of genuine Megatron-LM 0.19.2 with --optimizer-cpu-offload, resumed under the same and other layouts.

Half of the shards are stepped by torch's AdamW, half by FusedAdam. Stock restarts the former at step 1 and keeps the
latter at the saved step, under the same layout, without a word; under another one it refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import assemble, parameter_settings

from tests.harness.jobs import (
    LAST,
    OFF,
    RANK_SCRIPTS,
    SAVED,
    Job,
    assert_same_optimizer,
    assert_same_training_state,
    differing,
    resume,
    run_job,
    train_and_save,
)
from tests.harness.layouts import Layout
from tests.harness.models import LLAMA

LAYOUT = Layout(1, 2, 4)
OTHER = Layout(2, 1, 4)
PLUGIN = [launch.CPU_OFFLOAD]
OVERLAP = ["--overlap-cpu-optimizer-d2h-h2d"]


def offloading(fraction: float, *more: str) -> list[str]:
    """Arguments of the untied model with so much of its optimizer on the CPU."""
    offload = ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    return [*LLAMA, *offload, "--optimizer-offload-fraction", str(fraction), *more]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Trained to the end, so that what comes after the checkpoint is known."""
    return train_and_save(
        tmp_path_factory.mktemp("half") / "job", LAYOUT, more=offloading(0.5), plugins=PLUGIN, until=LAST
    )


def test_stock_goes_on_with_a_wrong_step(half: Job, folder: Path) -> None:
    """Why the package takes this load over although the layout is the same."""
    stock = resume(folder, LAYOUT, half.run, more=offloading(0.5), plugins=PLUGIN, environment=OFF, until=LAST)
    with pytest.raises(ValueError, match=r"ranks disagree: .*'step': 1\b"):
        parameter_settings(stock.at_load)
    assert abs(stock.losses[LAST] - half.losses[LAST]) > 0.01


def test_under_the_same_layout_training_goes_on_exactly(half: Job, folder: Path) -> None:
    resumed = resume(folder, LAYOUT, half.run, more=offloading(0.5), plugins=PLUGIN, until=LAST)
    assert_resumed(half, resumed)
    assert resumed.losses == {number: loss for number, loss in half.losses.items() if number > SAVED}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (OTHER, offloading(0.5)),
        (Layout(1, 1, 2), offloading(1.0, *OVERLAP)),
        (Layout(2, 2, 4), offloading(0.0)),
        (LAYOUT, LLAMA),
    ],
    ids=["half, TP2", "all with overlap, TP1 x PP1", "none, TP2 x PP2", "off, same layout"],
)
def test_another_layout_and_another_share(half: Job, layout: Layout, options: Sequence[str], folder: Path) -> None:
    resumed = resume(folder, layout, half.run, more=options, plugins=PLUGIN, until=LAST)
    assert_resumed(half, resumed)
    expected = {number: loss for number, loss in half.losses.items() if number > SAVED}
    assert resumed.losses == pytest.approx(expected, rel=1e-4)


def test_a_job_that_offloads_nothing_does_not_write_its_step(tmp_path: Path) -> None:
    """It follows from the schedule; and the option can be switched on."""
    saved = train_and_save(tmp_path / "saved", LAYOUT, more=offloading(0.0), plugins=PLUGIN)
    resumed = resume(tmp_path / "resumed", OTHER, saved.run, more=offloading(1.0), plugins=PLUGIN)
    assert_resumed(saved, resumed)


def test_of_a_tied_embedding_whose_copies_differ_the_first_stages_is_kept(tmp_path: Path) -> None:
    """One copy is stepped by FusedAdam and the other by torch's AdamW, which do not agree in every bit."""
    options = [option for option in offloading(0.5) if option not in LLAMA]
    saved = train_and_save(tmp_path / "saved", LAYOUT, more=options, plugins=PLUGIN)
    with pytest.raises(ValueError, match="word_embeddings.weight: copies that must be the same differ"):
        assemble(saved.at_save)
    resumed = resume(tmp_path / "resumed", OTHER, saved.run, more=options, plugins=PLUGIN)
    assert differing(assemble(saved.at_save, copies_may_differ=True), assemble(resumed.at_load)) == []


def test_ranks_with_different_shares_are_refused(half: Job, folder: Path) -> None:
    uneven = RANK_SCRIPTS / "uneven_offload.py"
    result = run_job(folder, LAYOUT, load=half.run, more=offloading(0.5), plugins=[*PLUGIN, uneven])
    assert result.returncode != 0
    assert "the ranks of this job do not keep their optimizers in the same way" in result.output
    assert "CPU offload of 0.5 on rank 0, 2, 3; CPU offload of 0.25 on rank 1" in result.output
    assert "the optimizer is untouched" in result.output


def assert_resumed(saved: Job, resumed: Job) -> None:
    assert_same_optimizer(saved.at_save, resumed.at_load)
    assert_same_training_state(saved.at_save, resumed.at_load)
    masters = [name for name in assemble(saved.at_save) if name.startswith("fp32_param.")]
    assert int(resumed.summary["parameters"]) == len(masters)
