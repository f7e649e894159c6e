"""Test jobs of genuine Megatron-LM 0.19.2 with Muon and Lion: whole, layer-wise, or partly distributed.

Stock reshards the first two itself if both sides have the same parameter groups. It refuses or fails with the third
under another layout, and if one kind becomes another. Muon's update depends on tensor parallelism, so losses after such
a change are only near those of the uninterrupted run, also with stock's resharding. All jobs are one launch. With
MEGATRON_LM_PATH, a checkout runs them as well.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble, parameter_settings, training_state

from mcore_ckpt_ext import Legacy, TorchDist, convert, open_checkpoint
from mcore_ckpt_ext.job.dimensions import PINS
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.layout_plan import plan
from mcore_ckpt_ext.rehearsal.rehearse import rehearse
from mcore_ckpt_ext.targets import Target
from tests.harness.checkouts import EITHER, optimizers_of_checkout, version
from tests.harness.checkpoints import assert_converted, everything_in, fixture_named
from tests.harness.jobs import LAST, RANK_SCRIPTS, SAVED, SEEDED, Job, differing
from tests.harness.layouts import Layout, experts_over
from tests.harness.models import GATED_EXPERTS, LLAMA
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        find_spec("emerging_optimizers") is None, reason="needs emerging-optimizers, which the extra `test` installs"
    ),
]
LAYOUT, OTHER = Layout(1, 2, 4), Layout(2, 1, 4)
MUON = ("--optimizer", "muon")
LAYER_WISE = (*MUON, "--use-distributed-optimizer")
LION = ("--optimizer", "lion")
SOAP, ADAPTIVE = ("--optimizer", "soap"), ("--optimizer", "adaptive_muon")
# What Muon does not step is Lion's, not Adam's.
WITH_LION = (*MUON, "--muon-scalar-optimizer", "lion")
# Adam's or Lion's part in a DistributedOptimizer of its own.
SPLIT = {"TEST_BY_FUNCTION": "1"}
BESIDE = "layer_wise + dp_reshardable"
# Stages without embeddings have an empty group before two others, with masters of one shape.
GROUPS = (*LLAMA, "--decoupled-lr", "5e-4", "--qk-layernorm", "--apply-wd-to-qk-layernorm",
          "--num-attention-heads", "1", "--num-query-groups", "1")  # fmt: skip
STAGES = Layout(1, 4, 4)
# Muon's update of a matrix that tensor parallelism cuts is another one; see the fixtures' `stock_reshard`.
NEAR = 1e-3


@pytest.fixture(scope="module", params=EITHER)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Jobs that save, trained further, so that what comes after the checkpoint is known; and who resumes."""
    if request.param and version() == "0.16":
        pytest.skip("the Muon of 0.16 does not run with emerging-optimizers 0.3.0")
    folder = tmp_path_factory.mktemp("muon")
    adam, stocks = fixture_named("p41").run, fixture_named("p44").run
    split, experts, lion, beside, stages = (
        folder / name / "checkpoints" for name in ("split", "experts", "lion", "with Lion", "stages")
    )
    turns = [
        Turn(folder / "split", LAYOUT, more=LLAMA, optimizer=LAYER_WISE, saves=True, until=LAST, environment=SPLIT),
        Turn(folder / "split, TP2", OTHER, more=LLAMA, optimizer=LAYER_WISE, load=split, until=LAST, environment=SPLIT),
        Turn(folder / "split, whole", Layout(1, 1, 4), more=LLAMA, optimizer=MUON, load=split, until=LAST),
        Turn(folder / "stock's", OTHER, optimizer=LAYER_WISE, load=stocks),
        Turn(folder / "experts", experts_over(1, 2, 4, 2), more=GATED_EXPERTS, optimizer=MUON, saves=True, until=5),
        Turn(folder / "experts, EP1", experts_over(1, 1, 4, 1), more=GATED_EXPERTS, optimizer=LAYER_WISE, load=experts),
        Turn(folder / "lion", LAYOUT, more=LLAMA, optimizer=LION, saves=True, until=5),
        Turn(folder / "lion, layer-wise", OTHER, more=LLAMA, optimizer=(*LION, "--use-distributed-optimizer"),
             load=lion),
        Turn(folder / "with Lion", LAYOUT, more=LLAMA, optimizer=(*WITH_LION, "--use-distributed-optimizer"),
             saves=True, until=5, environment=SPLIT),
        Turn(folder / "with Lion, TP2", OTHER, more=LLAMA, optimizer=(*WITH_LION, "--use-distributed-optimizer"),
             load=beside, environment=SPLIT),
        Turn(folder / "with Lion, whole", Layout(1, 1, 4), more=LLAMA, optimizer=WITH_LION, load=beside),
        Turn(folder / "from Adam to Muon", LAYOUT, optimizer=MUON, load=adam),
        Turn(folder / "from Muon to Adam", LAYOUT, load=stocks),
        Turn(folder / "from Lion to Adam", LAYOUT, more=LLAMA, optimizer=LAYER_WISE, load=beside, environment=SPLIT),
        Turn(folder / "from Adam to SOAP", LAYOUT, optimizer=SOAP, load=adam),
        Turn(folder / "from Adam to adaptive Muon", LAYOUT, optimizer=ADAPTIVE, load=adam),
        Turn(folder / "SOAP saves", LAYOUT, optimizer=SOAP, saves=True, until=SAVED),
        Turn(folder / "adaptive Muon steps", LAYOUT, optimizer=ADAPTIVE, until=1),
        Turn(folder / "stages", STAGES, more=GROUPS, optimizer=MUON, saves=True, until=5),
        Turn(folder / "stages, again", STAGES, more=GROUPS, optimizer=MUON, load=stages),
        Turn(folder / "stages, stock", STAGES, more=GROUPS, optimizer=MUON, load=stages, stock=True),
    ]  # fmt: skip
    plugins = [] if request.param else [RANK_SCRIPTS / "model_by_function.py"]  # as a checkout's own script does
    return run_in_turn(folder, turns, plugins, of_checkout=request.param)


KINDS = {
    "split": {"exp_avg", "exp_avg_sq", "momentum_buffer"},
    "experts": {"exp_avg", "exp_avg_sq", "momentum_buffer"},
    "lion": {"exp_avg", "exp_avg_sq"},
    "with Lion": {"exp_avg", "momentum_buffer"},
}


def check_has(name: str, results: Results) -> None:
    """The branch `dev` of August 2026 has the option, and does not look at it."""
    if "Lion" in name and results.of_checkout and "muon_scalar_optimizer" not in optimizers_of_checkout():
        pytest.skip("this Megatron gives Adam whatever Muon does not step")


@pytest.mark.parametrize(
    ("saved", "resumed", "stored"),
    [
        ("split", "split, TP2", BESIDE),
        ("split", "split, whole", BESIDE),
        ("with Lion", "with Lion, TP2", BESIDE),
        ("with Lion", "with Lion, whole", BESIDE),
        # Stock cannot merge the parameter groups: those of experts are on one side only.
        ("experts", "experts, EP1", "no_distributed_optimizer"),
    ],
)
def test_under_another_layout_and_as_another_kind(saved: str, resumed: str, stored: str, results: Results) -> None:
    check_has(saved, results)
    assert results.job(resumed).summary["format"] == stored
    assert_resumed(results.job(saved), results.job(resumed), KINDS[saved])


@pytest.mark.parametrize("saved", ["split", "with Lion"])
def test_a_plan_knows_what_each_parameter_keeps(saved: str, results: Results) -> None:
    """A matrix has a momentum, every other parameter the moments of its own optimizer."""
    check_has(saved, results)
    run = results.job(saved).run
    planned, *_ = plan(run, 4).layouts
    rehearsed = rehearse(run, 4, {name: planned.sizes[label] for label, name in PINS.items()})
    assert (rehearsed.will_succeed, rehearsed.bytes_read) == (True, planned.read_in_all)


def test_stock_loads_what_it_can_reshard(results: Results) -> None:
    """A script that builds the model by a function has Adam's part elsewhere, so that it is no longer stock's."""
    resumed = results.job("stock's")
    assert (resumed.said_of_loads == []) != results.of_checkout
    assert len([line for line in resumed.said if SEEDED in line]) == 1
    assert differing(fixture_named("p44").truth, assemble(resumed.at_load)) == []


def test_masters_behind_an_empty_group_stay_theirs(results: Results) -> None:
    """Stock copies the masters of the other norms into those of queries and keys, under the same layout."""
    saved, resumed = results.job("stages"), results.job("stages, again")
    assert_resumed(saved, resumed, KINDS["split"])
    assert resumed.losses[5] == saved.losses[5]
    wrong = differing(assemble(saved.at_save), assemble(results.job("stages, stock").at_load))
    assert wrong
    assert all(name.startswith("fp32_param.") and "_layernorm." in name for name in wrong)


def test_lion_becomes_layer_wise(results: Results) -> None:
    assert_resumed(results.job("lion"), results.job("lion, layer-wise"), KINDS["lion"])


@pytest.mark.parametrize(("name", "described"), [("lion", "Lion and Adam"), ("with Lion", "Muon and Lion")])
def test_lion_is_converted_and_back(name: str, described: str, results: Results, tmp_path: Path) -> None:
    check_has(name, results)
    saved = results.job(name)
    assert inspect(saved.run).optimizer == described
    assert_converted(saved.run, assemble(saved.at_save), tmp_path)


@pytest.mark.parametrize(
    ("target", "says", "marked"),
    [
        (TorchDist(megatron_version="0.19"), "core_v0.19.1 and later have one in addition to", True),
        (TorchDist(megatron_version="0.16"), "that version has no separate DistributedOptimizer", False),
        (Legacy(megatron_version="0.19"), "written whole, what was distributed, too", False),
    ],
    ids=["0.19", "0.16", "legacy"],
)
def test_versions_that_share_the_optimizer_out_differently(
    target: Target, says: str, marked: bool, results: Results, tmp_path: Path
) -> None:
    """Adam's part is in a DistributedOptimizer of its own since 0.19.1 only, and never in legacy files."""
    saved = results.job("split")
    report = convert(saved.run, tmp_path / "out", target)
    assert any(says in note for note in report.notes)
    written = open_checkpoint(tmp_path / "out")
    assert any(written.optimizer.state().is_distributed(name) for name in written.names("exp_avg")) == marked
    assert (
        any("param_state_sharding_type" in child for child in written.optimizer.chained_optimizer_settings()) == marked
    )
    assert not written.job.arguments().use_distributed_optimizer
    assert differing(assemble(saved.at_save), everything_in(written)) == []


@pytest.mark.parametrize(
    ("name", "stored", "wanted"),
    [
        ("from Adam to Muon", "exp_avg and exp_avg_sq of this parameter", "momentum_buffer"),
        ("from Muon to Adam", "momentum_buffer of this parameter", "exp_avg and exp_avg_sq"),
        ("from Lion to Adam", "exp_avg of this parameter", "exp_avg and exp_avg_sq"),
        ("from Adam to SOAP", "--optimizer adam", "--optimizer soap"),
        ("from Adam to adaptive Muon", "--optimizer adam", "--optimizer adaptive_muon"),
    ],
)
def test_another_kind_of_optimizer_is_refused_on_all_ranks(
    name: str, stored: str, wanted: str, results: Results
) -> None:
    check_has(name, results)
    result = results[name]
    assert result.returncode != 0
    assert "the checkpoint was written by another kind of optimizer than the running one" in result.output
    assert f"found: {stored}" in result.output
    assert f"expected: {wanted}" in result.output
    assert "--no-load-optim" in result.output
    for rank in range(4):
        assert f"[rank {rank}] mcore_ckpt_ext.errors.ResumeRefusedError: " in result.output
    assert "the optimizer is unchanged" in result.output


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("SOAP saves", "does not match model shape"),
        ("adaptive Muon steps", "'TensorParallelAdaptiveMuon' object has no attribute 'scale_mode'"),
    ],
)
def test_unsupported_optimizers_fail_in_stock(name: str, reason: str, results: Results) -> None:
    """There are no such checkpoints to serve. Once this fails, there are: the documentation's table says so."""
    if results.of_checkout:
        pytest.skip("told of the installed Megatron, and of emerging-optimizers 0.3.0")
    assert results[name].returncode != 0
    assert reason in results[name].output


def assert_resumed(saved: Job, resumed: Job, moments: set[str]) -> None:
    """Every element of the live state, settings and progress; the losses that follow are near."""
    expected, found = assemble(saved.at_save), assemble(resumed.at_load)
    assert {name.partition(".")[0] for name in expected} == {"weight", "fp32_param", *moments}
    assert differing(expected, found) == []
    assert training_state(saved.at_save) == training_state(resumed.at_load)
    settings, others = parameter_settings(saved.at_save), parameter_settings(resumed.at_load)
    assert {name: unmapped_tensors(own) for name, own in settings.items()} == {
        name: unmapped_tensors(own) for name, own in others.items()
    }
    following = {number: loss for number, loss in saved.losses.items() if number in resumed.losses}
    assert following and min(following) == SAVED + 1
    assert {number: resumed.losses[number] for number in following} == pytest.approx(following, rel=NEAR)


def unmapped_tensors(settings: dict[str, object]) -> dict[str, object]:
    """Experts are ordinary parameters where there is one expert-parallel rank."""
    return {key: value for key, value in settings.items() if key != "is_expert_parallel"}
