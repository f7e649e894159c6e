"""Test flags of Megatron in a resume under another layout: they apply, or a message says that they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble

from tests.harness.checkouts import EITHER, checkout_job, version
from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import OFF, differing, resume, run_job, train_and_save
from tests.harness.layouts import Layout, experts_over
from tests.harness.models import GATED_EXPERTS

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("target", [Layout(1, 1, 4), Layout(2, 1, 8)], ids=["more ranks", "TP2, too"])
def test_random_states_of_more_data_parallel_ranks(target: Layout, tmp_path: Path) -> None:
    """Each rank asks for its own, and there are two: stock ends by IndexError, once the weights are loaded."""
    flag = ["--data-parallel-random-init"]
    saved = train_and_save(tmp_path / "saved", Layout(1, 1, 2), more=flag)
    if target.tensor == 1:
        stock = run_job(tmp_path / "stock", target, load=saved.run, more=flag, environment=OFF)
        assert "IndexError" in stock.output
    resumed = resume(tmp_path / "resumed", target, saved.run, more=flag)
    assert "random state is reinitialized" in resumed.output
    assert differing(assemble(saved.at_save), assemble(resumed.at_load)) == []


@pytest.mark.parametrize("of_checkout", EITHER)
@pytest.mark.parametrize(
    ("ranks", "more", "kind"),
    [(4, [], "all"), (8, [], "all"), (4, ["--no-load-optim"], "weights")],
    ids=["same ranks", "more ranks", "weights alone"],
)
def test_random_states_of_expert_jobs(
    ranks: int, more: list[str], kind: str, of_checkout: bool, tmp_path: Path
) -> None:
    """0.16 stores one for each rank of TP x PP x DP, and every other version one for each of TP x PP.

    Stock requests its own, and ends by "Missing key in checkpoint state_dict: rng_state/shard_...".
    """
    source, layout = fixture_named("p09"), experts_over(1, 2, ranks, 2)
    options = {"more": [*GATED_EXPERTS, *more], **(checkout_job() if of_checkout else {})}
    is_left_to_stock = of_checkout and version() == "0.16" and ranks == 8
    if not is_left_to_stock:
        stock = run_job(tmp_path / "stock", layout, load=source.run, environment=OFF, **options)
        assert "rng_state/shard_0.0" in stock.output
    resumed = resume(tmp_path / "resumed", layout, source.run, **options)
    assert ("random state is reinitialized" in resumed.output) != is_left_to_stock
    truth, found = source.truth, assemble(resumed.at_load)
    if kind == "weights":
        truth, found = (
            {name: value for name, value in one.items() if name.startswith("weight.")} for one in (truth, found)
        )
    assert differing(truth, found) == []


def test_everything_stored_must_be_asked_for(tmp_path: Path) -> None:
    """Megatron is not asked for the optimizer, which this package fills."""
    source = fixture_named("p01")
    job = resume(tmp_path, Layout(2, 2, 4), source.run, more=["--dist-ckpt-strictness", "raise_all"])
    assert differing(source.truth, assemble(job.at_load)) == []
