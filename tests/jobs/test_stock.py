"""Test that stock Megatron-LM 0.19.2 loads whatever it can, with its unchanged arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM
from tests.harness.cases import Case, Outcomes, load_all, save_noise
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import flip, payload_position
from tests.harness.jobs import SEEDED, Job, copy_of, differing, run_job
from tests.harness.layouts import Layout

LAYOUT = Layout(2, 1, 2)
MATRIX, ELEMENT = "decoder.layers.1.mlp.linear_fc1.weight", 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stock")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    """A witness in the place of stock's `load_checkpoint` sees the calls that reach it."""
    saved = save_noise(folder / "saved", LAYOUT)
    other_layout = fixture_named("p01").run
    cases = [
        Case("same layout", saved, dump=folder / "loaded"),
        Case("--no-load-optim", other_layout, arguments={"no_load_optim": True}),
        Case("--finetune", other_layout, arguments={"finetune": True}),
        Case("no checkpoint", folder / "empty"),
        Case("no --load", folder / "empty", arguments={"load": None}),
        Case("another layout", other_layout),
        Case("a master is wrong", wrong_master(saved, folder / "wrong")),
        Case("a master is wrong, and may be", folder / "wrong", environment={"MCORE_CKPT_EXT_PROOF": "warn"}),
    ]
    return load_all(folder / "job", LAYOUT, cases)


def wrong_master(saved: Path, run: Path) -> Path:
    """A copy with a flipped bit in the only place of the first tensor-parallel rank's master."""
    copy = copy_of(saved, run)
    path, position = payload_position(open_checkpoint(copy), FP32_PARAM, MATRIX, ELEMENT)
    flip(path, position + 3)
    return copy


@pytest.mark.parametrize("name", ["same layout", "--no-load-optim", "--finetune", "no checkpoint", "no --load"])
def test_the_original_function_receives_the_original_arguments(name: str, outcomes: Outcomes) -> None:
    """The very objects, positional and by keyword, once; Megatron's own arguments are unchanged at that moment."""
    for rank in outcomes[name]:
        assert rank["error"] is None
        assert rank["passed_through"] == [True]


@pytest.mark.parametrize("name", ["same layout", "--finetune", "no checkpoint", "no --load"])
def test_the_product_does_and_says_nothing(name: str, outcomes: Outcomes) -> None:
    for rank in outcomes[name]:
        assert rank["resumes"] == 0
        assert rank["lines"] == []


def test_of_weights_under_another_layout_only_random_states_are_seeded(outcomes: Outcomes) -> None:
    for rank in outcomes["--no-load-optim"]:
        assert rank["resumes"] == 0
        assert rank["lines"] == [SEEDED]


def test_the_recorder_sees_what_is_not_passed_through(outcomes: Outcomes) -> None:
    """Under another layout the original is called without the optimizer, once, and we resume that."""
    for rank in outcomes["another layout"]:
        assert rank["error"] is None
        assert rank["passed_through"] == [False]
        assert rank["resumes"] == 1
        assert len(rank["lines"]) == 1


def test_a_stock_load_is_verified_and_stops_the_job_on_every_rank(outcomes: Outcomes) -> None:
    for rank in outcomes["a master is wrong"]:
        assert rank["passed_through"] == [True]
        assert rank["error"].startswith("ProofError: after this load 1 parameter has masters that do not round")
        assert f"{MATRIX}, element {ELEMENT}: master " in rank["error"]
        assert "one of every 3 stretches of 131,072 elements was compared" in rank["error"]
        assert "MCORE_CKPT_EXT_PROOF=warn" in rank["error"]


def test_a_warning_is_enough_for_who_says_so(outcomes: Outcomes) -> None:
    for rank in outcomes["a master is wrong, and may be"]:
        assert (rank["error"], rank["iteration"]) == (None, 4)
        (line,) = rank["lines"]
        assert MATRIX in line


def test_under_the_same_layout_stock_resumes_the_optimizer(folder: Path, outcomes: Outcomes) -> None:
    assert outcomes["same layout"][0]["iteration"] == 4
    assert differing(assemble(folder / "saved" / "dump" / "after_save_0000004"), assemble(folder / "loaded")) == []


def test_results_of_stock_are_returned(outcomes: Outcomes) -> None:
    for name, iteration in (("--no-load-optim", 4), ("--finetune", 0)):
        assert [rank["iteration"] for rank in outcomes[name]] == [iteration, iteration]


def test_a_fresh_start_leaves_everything_as_it_was(outcomes: Outcomes) -> None:
    for name in ("no checkpoint", "no --load"):
        for rank in outcomes[name]:
            assert rank["iteration"] == 0
            assert rank["after"] == rank["before"]


def test_switched_off_the_genuine_refusal_is_back(gpt: Job, tmp_path: Path) -> None:
    result = run_job(tmp_path, LAYOUT, load=gpt.run, environment={"MCORE_CKPT_EXT": "0"})
    assert result.returncode != 0
    expected = "RuntimeError: (TP, PP) mismatch after resume ((2, 1) vs (1, 4) from checkpoint): not supported"
    assert expected in result.output
    assert "[mcore_ckpt_ext]" not in result.output
