"""Test intact checkpoints that stock Megatron-LM 0.19.2 cannot resume under the layout of the save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from megatron_on_cpu.compat import ADAM_VARIABLE
from megatron_on_cpu.dump_optimizer import assemble

from tests.harness.jobs import (
    OFF,
    SAVED,
    assert_same_optimizer,
    assert_same_training_state,
    differing,
    resume,
    run_job,
    train_and_save,
)
from tests.harness.layouts import Layout
from tests.harness.models import GATED_EXPERTS

pytestmark = pytest.mark.nightly

LAYOUT = Layout(1, 2, 4)


@pytest.mark.parametrize(
    ("precision", "environment", "stock_says"),
    [
        ((), {}, "a view of a leaf Variable that requires grad is being used in an in-place operation"),
        (("--bf16",), {ADAM_VARIABLE: "torch"}, "assert len(steps) == 1"),
    ],
    ids=["fp32 training", "torch's Adam"],
)
def test_the_plugin_resumes_under_the_same_layout(
    precision: Sequence[str], environment: dict[str, str], stock_says: str, tmp_path: Path
) -> None:
    saved = train_and_save(tmp_path / "saved", LAYOUT, precision=precision, environment=environment, until=SAVED + 1)
    stock = run_job(tmp_path / "stock", LAYOUT, load=saved.run, precision=precision, environment={**environment, **OFF})
    assert stock.returncode != 0
    assert stock_says in stock.output
    resumed = resume(tmp_path / "resumed", LAYOUT, saved.run, precision=precision, environment=environment)
    assert_same_optimizer(saved.at_save, resumed.at_load)
    assert_same_training_state(saved.at_save, resumed.at_load)
    assert (resumed.summary["source"], resumed.summary["target"]) == (str(LAYOUT), str(LAYOUT))
    assert resumed.losses[SAVED + 1] == pytest.approx(saved.losses[SAVED + 1], rel=1e-6)


@pytest.mark.parametrize("expert", [(2, 1), (1, 2)], ids=["EP2 to EP1", "EP1 to EP2"])
def test_a_fully_reshardable_state_follows_experts_into_another_optimizer(
    expert: tuple[int, int], tmp_path: Path
) -> None:
    """Experts have an optimizer of their own, or share one; stock Megatron loads only as many as were saved."""
    before, after = ([*GATED_EXPERTS, "--expert-model-parallel-size", str(size)] for size in expert)
    save = [*before, "--dist-ckpt-optim-fully-reshardable"]
    saved = train_and_save(tmp_path / "saved", Layout(1, 1, 2), until=SAVED + 1, more=save, environment=OFF)
    stock = run_job(tmp_path / "stock", Layout(1, 1, 2), load=saved.run, more=after, environment=OFF)
    assert stock.returncode != 0
    resumed = resume(tmp_path / "resumed", Layout(1, 1, 2), saved.run, more=after)
    assert resumed.summary["format"] == "fully_reshardable"
    assert differing(assemble(saved.at_save), assemble(resumed.at_load)) == []
    assert resumed.losses[SAVED + 1] == pytest.approx(saved.losses[SAVED + 1], rel=1e-4)
