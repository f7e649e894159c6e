"""Jobs of genuine Megatron-LM 0.19.2 with Muon: whole, layer-wise, and layer-wise beside a DistributedOptimizer.

Stock reshards the first two by itself as long as there are the same parameter groups on both sides, and refuses or
fails with the third: under another layout, and where one kind becomes another. Muon's update depends on tensor
parallelism, so losses after such a change are near those of the uninterrupted run, with stock's resharding, too.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble, parameter_settings, training_state

from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import LAST, RANK_SCRIPTS, SAVED, Job, differing, resume, run_job, train_and_save
from tests.harness.layouts import Layout, experts_over
from tests.harness.models import GATED_EXPERTS, LLAMA

pytestmark = pytest.mark.skipif(
    find_spec("emerging_optimizers") is None, reason="needs emerging-optimizers, which the extra `test` installs"
)
MUON = ("--optimizer", "muon")
LAYER_WISE = ("--optimizer", "muon", "--use-distributed-optimizer")
# Adam's part in a DistributedOptimizer of its own.
SPLIT = [RANK_SCRIPTS / "model_by_function.py"]
BESIDE = "layer_wise + dp_reshardable"
# Muon's update of a matrix that tensor parallelism cuts is another one; see the fixtures' `stock_reshard`.
NEAR = 1e-3


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Trained to the end, so that what comes after the checkpoint is known."""
    folder = tmp_path_factory.mktemp("split") / "job"
    return train_and_save(folder, Layout(1, 2, 4), more=LLAMA, optimizer=LAYER_WISE, plugins=SPLIT, until=LAST)


def test_layer_wise_beside_a_distributed_optimizer_under_another_layout(split: Job, folder: Path) -> None:
    resumed = resume(folder, Layout(2, 1, 4), split.run, more=LLAMA, optimizer=LAYER_WISE, plugins=SPLIT, until=LAST)
    assert resumed.summary["format"] == BESIDE
    assert_resumed(split, resumed)


def test_it_may_become_muon_of_whole_parameters(split: Job, folder: Path) -> None:
    resumed = resume(folder, Layout(1, 1, 2), split.run, more=LLAMA, optimizer=MUON, until=LAST)
    assert resumed.summary["format"] == BESIDE
    assert_resumed(split, resumed)


def test_what_stock_reshards_is_left_to_it(folder: Path) -> None:
    source = fixture_named("p44")
    resumed = resume(folder, Layout(2, 1, 4), source.run, optimizer=LAYER_WISE)
    assert resumed.said == []
    assert differing(source.truth, assemble(resumed.at_load)) == []


def test_experts_leave_their_own_optimizer_and_find_another(tmp_path: Path) -> None:
    """Stock cannot merge the parameter groups: those of experts are on one side only."""
    saved = train_and_save(
        tmp_path / "saved", experts_over(1, 2, 4, 2), more=GATED_EXPERTS, optimizer=MUON, until=SAVED + 1
    )
    layout = experts_over(1, 1, 4, 1)
    resumed = resume(tmp_path / "resumed", layout, saved.run, more=GATED_EXPERTS, optimizer=LAYER_WISE)
    assert resumed.summary["format"] == "no_distributed_optimizer"
    assert_resumed(saved, resumed)


@pytest.mark.parametrize(
    ("fixture", "optimizer", "stored", "wanted"),
    [
        ("p41", MUON, "exp_avg and exp_avg_sq", "momentum_buffer"),
        ("p44", ("--use-distributed-optimizer",), "momentum_buffer", "exp_avg and exp_avg_sq"),
    ],
    ids=["from Adam to Muon", "from Muon to Adam"],
)
def test_another_kind_of_optimizer_is_refused_on_all_ranks(
    fixture: str, optimizer: tuple[str, ...], stored: str, wanted: str, folder: Path
) -> None:
    result = run_job(folder, Layout(1, 2, 4), load=fixture_named(fixture).run, optimizer=optimizer)
    assert result.returncode != 0
    assert "the checkpoint was written by an optimizer of another kind than the running one" in result.output
    assert f"found: {stored} of this parameter" in result.output
    assert f"expected: {wanted}" in result.output
    assert "--no-load-optim" in result.output
    for rank in range(4):
        assert f"[rank {rank}] mcore_ckpt_ext.errors.ResumeRefusedError: " in result.output
    assert "the optimizer is untouched" in result.output


def assert_resumed(saved: Job, resumed: Job) -> None:
    """Every element of the live state, settings and progress; the losses that follow are near."""
    expected, found = assemble(saved.at_save), assemble(resumed.at_load)
    kinds = {"weight", "fp32_param", "exp_avg", "exp_avg_sq", "momentum_buffer"}
    assert {name.partition(".")[0] for name in expected} == kinds
    assert differing(expected, found) == []
    assert training_state(saved.at_save) == training_state(resumed.at_load)
    settings, others = parameter_settings(saved.at_save), parameter_settings(resumed.at_load)
    assert {name: without_place(own) for name, own in settings.items()} == {
        name: without_place(own) for name, own in others.items()
    }
    following = {number: loss for number, loss in saved.losses.items() if number in resumed.losses}
    assert following
    assert {number: resumed.losses[number] for number in following} == pytest.approx(following, rel=NEAR)


def without_place(settings: dict[str, object]) -> dict[str, object]:
    """Experts are ordinary parameters where there is one expert-parallel rank."""
    return {key: value for key, value in settings.items() if key != "is_expert_parallel"}
