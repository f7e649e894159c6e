"""Test genuine Megatron-LM 0.19.2 with and without --use-distributed-optimizer, with experts, and with SGD.

With MEGATRON_LM_PATH, a checkout runs the same. All jobs are one launch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble, parameter_settings

from mcore_ckpt_ext import FsdpDtensor, convert
from mcore_ckpt_ext.job.releases import MATCHES_GROUPS_BY_BOUNDS
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.inspection import inspect
from tests.harness.checkouts import EITHER, release_of
from tests.harness.checkpoints import assert_converted
from tests.harness.jobs import LEGACY, SAVED, assert_same_training_state, differing
from tests.harness.layouts import Layout, experts_over
from tests.harness.models import GATED_EXPERTS
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

WHOLE = ()
SAME, OTHER = Layout(1, 2, 4), Layout(2, 1, 4)
EP1, EP2 = experts_over(1, 1, 4, 1), experts_over(1, 2, 4, 2)
SGD = ("--optimizer", "sgd")
PLAIN_SGD = (*SGD, "--sgd-momentum", "0")
# Three parameter groups: norms of queries and keys decay as matrices do, embeddings have their own learning rate.
GROUPS = ["--qk-layernorm", "--apply-wd-to-qk-layernorm", "--decoupled-lr", "5e-4"]


@pytest.fixture(scope="module", params=EITHER)
def of_checkout(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def results(of_checkout: bool, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Jobs that save, trained one step further; and who resumes."""
    folder = tmp_path_factory.mktemp("whole")
    run = {name: folder / name / "checkpoints" for name in (
        "whole", "distributed", "fp32", "experts", "experts together", "SGD", "plain SGD", "nothing"
    )}  # fmt: skip
    to_legacy = ["convert", run["whole"], folder / "legacy", "--to", "legacy", "--tensor-model-parallel-size", 2]
    to_legacy += ["--pipeline-model-parallel-size", 1]
    turns = [
        Turn(folder / "whole", SAME, more=GROUPS, optimizer=WHOLE, saves=True, until=5),
        Turn(folder / "switched on", SAME, more=GROUPS, load=run["whole"]),
        Turn(folder / "switched on, TP2", OTHER, more=GROUPS, load=run["whole"]),
        Turn(folder / "distributed", SAME, saves=True, until=5),
        Turn(folder / "switched off", SAME, optimizer=WHOLE, load=run["distributed"]),
        Turn(folder / "switched off, TP2", OTHER, optimizer=WHOLE, load=run["distributed"]),
        Turn(folder / "fp32", SAME, precision=(), saves=True, until=5),
        Turn(folder / "fp32, switched off", SAME, optimizer=WHOLE, precision=(), load=run["fp32"]),
        Turn(folder / "fp32, switched off, TP2", OTHER, optimizer=WHOLE, precision=(), load=run["fp32"]),
        Turn(folder / "experts", EP2, more=GATED_EXPERTS, optimizer=WHOLE, precision=(), saves=True, until=5),
        Turn(folder / "experts, EP1", EP1, more=GATED_EXPERTS, optimizer=WHOLE, precision=(), load=run["experts"]),
        Turn(folder / "experts together", EP1, more=GATED_EXPERTS, optimizer=WHOLE, saves=True, until=5),
        Turn(folder / "experts, EP2", EP2, more=GATED_EXPERTS, optimizer=WHOLE, load=run["experts together"]),
        Turn(folder / "SGD", SAME, optimizer=SGD, saves=True, until=5),
        Turn(folder / "SGD, TP2", OTHER, optimizer=SGD, load=run["SGD"]),
        Turn(folder / "plain SGD", SAME, optimizer=PLAIN_SGD, saves=True, until=5),
        Turn(folder / "plain SGD, TP2", OTHER, optimizer=PLAIN_SGD, load=run["plain SGD"]),
        Turn(folder / "nothing", SAME, optimizer=PLAIN_SGD, precision=(), saves=True, until=5),
        Turn(folder / "nothing, TP2", OTHER, optimizer=PLAIN_SGD, precision=(), load=run["nothing"]),
        Turn(folder / "momentum lost", SAME, optimizer=PLAIN_SGD, load=run["SGD"]),
        Turn(folder / "momentum gained", SAME, optimizer=SGD, load=run["plain SGD"]),
        Turn(folder / "from SGD to Adam", SAME, optimizer=WHOLE, load=run["SGD"]),
        Turn(folder / "experts, stock", EP1, more=GATED_EXPERTS, optimizer=WHOLE, precision=(), load=run["experts"],
             stock=True),
        Turn(folder / "SGD, stock", SAME, optimizer=SGD, load=run["SGD"], stock=True),
        Turn(folder / "whole, legacy, stock", OTHER, more=[*GROUPS, *LEGACY, "--no-load-rng"], optimizer=WHOLE,
             load=folder / "legacy", stock=True, commands=[to_legacy]),
    ]  # fmt: skip
    return run_in_turn(folder, turns, of_checkout=of_checkout)


RESUMED = {
    "whole": ("switched on", "switched on, TP2"),
    "distributed": ("switched off", "switched off, TP2"),
    "fp32": ("fp32, switched off", "fp32, switched off, TP2"),
    "experts": ("experts, EP1",),
    "experts together": ("experts, EP2",),
    "SGD": ("SGD, TP2",),
    "plain SGD": ("plain SGD, TP2",),
    "nothing": ("nothing, TP2",),
}
MOMENTS = {"SGD": {"momentum_buffer"}, "plain SGD": set(), "nothing": set()}


@pytest.mark.parametrize("name", RESUMED)
def test_training_goes_on_with_every_bit_of_the_state(name: str, results: Results) -> None:
    saved = results.job(name)
    truth = assemble(saved.at_save)
    moments = MOMENTS.get(name, {"exp_avg", "exp_avg_sq"})
    assert {key.partition(".")[0] for key in truth} == {"weight", "fp32_param", *moments}
    for resumed in map(results.job, RESUMED[name]):
        assert "optimizer resumed from" in resumed.output
        assert differing(truth, assemble(resumed.at_load)) == []
        assert resumed.losses[SAVED + 1] == pytest.approx(saved.losses[SAVED + 1], rel=1e-4)
        if "exp_avg" in moments and "experts" not in name:
            assert_same_training_state(saved.at_save, resumed.at_load)
        else:
            assert settings(saved.at_save) == settings(resumed.at_load)


def settings(dump: Path) -> dict[str, dict[str, object]]:
    """Of every parameter; experts are ordinary parameters where there is one expert-parallel rank."""
    found = parameter_settings(dump)
    return {n: {k: v for k, v in own.items() if k != "is_expert_parallel"} for n, own in found.items()}


@pytest.mark.parametrize("name", ["experts", "experts together", "SGD", "plain SGD", "nothing"])
def test_it_is_converted_and_back(name: str, results: Results, tmp_path: Path) -> None:
    saved = results.job(name)
    described = {"SGD": "SGD with momentum", "plain SGD": "SGD", "nothing": "SGD"}
    assert inspect(saved.run).optimizer == described.get(name, "Adam")
    assert_converted(saved.run, assemble(saved.at_save), tmp_path)


def test_converted_files_have_each_parameter_in_its_group(results: Results, of_checkout: bool, tmp_path: Path) -> None:
    """Legacy files, resumed by stock; and Megatron-FSDP's, which have the settings beside each parameter."""
    saved = results.job("whole")
    if MATCHES_GROUPS_BY_BOUNDS.is_of(release_of(of_checkout)):
        resumed = results.job("whole, legacy, stock")
        assert differing(assemble(saved.at_save), assemble(resumed.at_load)) == []
        assert settings(saved.at_save) == settings(resumed.at_load)
    else:  # Older releases take groups that differ in their rates alone for one (`_filter_and_reorder_param_groups`).
        assert "doesn't match the size of optimizer's group" in results["whole, legacy, stock"].output
    convert(saved.run, tmp_path / "fsdp", FsdpDtensor())
    assert compare(saved.run, tmp_path / "fsdp").equal


@pytest.mark.parametrize("name", ["experts, stock", "SGD, stock"])
def test_stock_alone_cannot(name: str, results: Results) -> None:
    """Why the package takes these over: experts' groups are on one side alone; SGD lacks a function."""
    found = results[name]
    assert found.returncode != 0
    assert "[mcore_ckpt_ext]" not in found.output
    # In 0.16 and in 0.19.
    experts = ("pre_wd_mult", "Could not find parameter group")
    says = experts if "experts" in name else ("'NoneType' object is not callable",)
    assert any(words in found.output for words in says), found.output[-3000:]


@pytest.mark.parametrize(
    ("name", "found", "wanted"),
    [
        ("momentum lost", "momentum_buffer", "the master alone"),
        ("momentum gained", "the master alone", "momentum_buffer"),
        ("from SGD to Adam", "momentum_buffer", "exp_avg and exp_avg_sq"),
    ],
)
def test_a_momentum_is_neither_dropped_nor_invented(name: str, found: str, wanted: str, results: Results) -> None:
    refused = results[name]
    assert refused.returncode != 0
    assert f"found: {found} of this parameter" in refused.output
    assert f"expected: {wanted}" in refused.output
    assert "the optimizer is unchanged" in refused.output
