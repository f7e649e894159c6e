"""Test jobs of genuine Megatron-LM 0.19.2 with --optimizer-cpu-offload, resumed under several layouts.

torch's AdamW steps half of the shards, FusedAdam the other half. Under the same layout, stock silently restarts the
former at step 1 and keeps the latter at the saved step; under another one it refuses. All jobs are one launch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import assemble, parameter_settings

from mcore_ckpt_ext import Canonical, convert, verify
from tests.harness.checkouts import EITHER
from tests.harness.jobs import (
    LAST,
    RANK_SCRIPTS,
    SAVED,
    Job,
    assert_same_optimizer,
    assert_same_training_state,
    differing,
)
from tests.harness.layouts import Layout
from tests.harness.models import LLAMA
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

LAYOUT = Layout(1, 2, 4)
OTHER = Layout(2, 1, 4)
OVERLAP = ["--overlap-cpu-optimizer-d2h-h2d"]
UNEVEN = RANK_SCRIPTS / "uneven_offload.py"


def offloading(fraction: float, *more: str, model: list[str] = LLAMA) -> list[str]:
    """Arguments of a model with so much of its optimizer on the CPU."""
    offload = ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    return [*model, *offload, "--optimizer-offload-fraction", str(fraction), *more]


@pytest.fixture(scope="module", params=EITHER)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Three jobs that save, trained to the end, so that what comes after the checkpoint is known; and who resumes."""
    folder = tmp_path_factory.mktemp("offload")
    half, none, tied = (folder / name / "checkpoints" for name in ("half", "none", "tied"))
    untied, both = offloading(0.5), offloading(0.5, model=[])
    turns = [
        Turn(folder / "half", LAYOUT, more=untied, saves=True, until=LAST),
        Turn(folder / "none", LAYOUT, more=offloading(0.0), saves=True, until=SAVED),
        Turn(folder / "tied", LAYOUT, more=both, saves=True, until=SAVED),
        Turn(folder / "stock", LAYOUT, more=untied, load=half, until=LAST, stock=True),
        Turn(folder / "same layout", LAYOUT, more=untied, load=half, until=LAST),
        Turn(folder / "half, TP2", OTHER, more=untied, load=half, until=LAST),
        Turn(folder / "all with overlap, TP1 x PP1", Layout(1, 1, 4), more=offloading(1.0, *OVERLAP), load=half,
             until=LAST),
        Turn(folder / "none, TP2 x PP2", Layout(2, 2, 4), more=offloading(0.0), load=half, until=LAST),
        Turn(folder / "off, same layout", LAYOUT, more=LLAMA, load=half, until=LAST),
        Turn(folder / "uneven", LAYOUT, more=untied, load=half, environment={"TEST_UNEVEN": "1"}),
        Turn(folder / "switched on", OTHER, more=offloading(1.0), load=none),
        Turn(folder / "tied, TP2", OTHER, more=both, load=tied),
    ]  # fmt: skip
    return run_in_turn(folder, turns, [launch.CPU_OFFLOAD, UNEVEN], of_checkout=request.param)


@pytest.fixture(scope="module")
def half(results: Results) -> Job:
    return results.job("half")


def test_stock_goes_on_with_a_wrong_step(half: Job, results: Results) -> None:
    """Why the package takes this load over although the layout is the same."""
    stock = results.job("stock")
    assert stock.said == []
    with pytest.raises(ValueError, match=r"ranks disagree: .*'step': 1\b"):
        parameter_settings(stock.at_load)
    assert abs(stock.losses[LAST] - half.losses[LAST]) > 0.01


def test_under_the_same_layout_training_goes_on_exactly(half: Job, results: Results) -> None:
    resumed = results.job("same layout")
    assert_resumed(half, resumed)
    assert resumed.losses == {number: loss for number, loss in half.losses.items() if number > SAVED}


@pytest.mark.parametrize("name", ["half, TP2", "all with overlap, TP1 x PP1", "none, TP2 x PP2", "off, same layout"])
def test_another_layout_and_another_share(half: Job, results: Results, name: str) -> None:
    resumed = results.job(name)
    assert_resumed(half, resumed)
    expected = {number: loss for number, loss in half.losses.items() if number > SAVED}
    assert resumed.losses == pytest.approx(expected, rel=1e-4)


def test_a_job_that_offloads_nothing_does_not_write_its_step(results: Results) -> None:
    """It follows from the schedule; and the option can be switched on."""
    assert_resumed(results.job("none"), results.job("switched on"))


def test_of_a_tied_embedding_whose_copies_differ_the_first_stages_is_kept(results: Results, tmp_path: Path) -> None:
    """One copy is stepped by FusedAdam and the other by torch's AdamW, which do not agree in every bit."""
    saved, resumed = results.job("tied"), results.job("tied, TP2")
    with pytest.raises(ValueError, match="word_embeddings.weight: copies that must be the same differ"):
        assemble(saved.at_save)
    assert differing(assemble(saved.at_save, copies_may_differ=True), assemble(resumed.at_load)) == []
    said = "masters of the tied word embeddings differ between pipeline stages"
    assert said in resumed.summary.string
    found = verify(saved.run)
    assert found.sound
    assert {finding.check for finding in found.findings} == {"copies"}
    report = convert(saved.run, tmp_path / "out", Canonical())
    assert any(said in note for note in report.notes)


def test_ranks_with_different_shares_are_refused(results: Results) -> None:
    refused = results["uneven"]
    assert refused.returncode != 0
    assert "the ranks of this job have different kinds of optimizers" in refused.output
    assert "CPU offload of 0.5 on rank 0, 2, 3; CPU offload of 0.25 on rank 1" in refused.output
    assert "the optimizer is unchanged" in refused.output


def assert_resumed(saved: Job, resumed: Job) -> None:
    assert_same_optimizer(saved.at_save, resumed.at_load)
    assert_same_training_state(saved.at_save, resumed.at_load)
    masters = [name for name in assemble(saved.at_save) if name.startswith("fp32_param.")]
    assert int(resumed.summary["parameters"]) == len(masters)
