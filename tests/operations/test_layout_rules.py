"""Test that all commands accept the same layouts, by the rules of `plan`, and agree on what stock Megatron can do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import lcm
from pathlib import Path

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext import CheckpointError, Legacy, TorchDist, UnsupportedCheckpointError
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.formats.target import Target
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.layout_plan import plan
from mcore_ckpt_ext.operations.layout_rules import refusal_of_stored_files
from mcore_ckpt_ext.operations.resumptions import stock_resumes
from mcore_ckpt_ext.versions import NEWEST
from tests.harness.checkpoints import fixture_named

LAYOUT = ("tensor", "pipeline", "virtual_pipeline", "expert")
# Tensor, pipeline, virtual stages, experts: what divides the heads, layers and experts of a model, and what does not.
SIZES = [*product((1, 2, 3, 8), (1, 2, 3), (1, 2), (1, 2, 3))]


def refusal(run: Path, target: Target, destination: Path) -> CheckpointError | None:
    """Return why a conversion is refused; None if it would be written."""
    try:
        mcore_ckpt_ext.convert(run, destination, target, dry_run=True)
    except CheckpointError as error:
        return error
    assert not destination.exists()
    return None


def accepts(run: Path, tensor: int, pipeline: int, virtual: int, expert: int) -> bool:
    """Return whether `plan` lists a layout with these sizes; legacy files have no ETP of their own."""
    pins = {"tp": tensor, "pp": pipeline, "vpp": virtual, "ep": expert, "etp": tensor}
    return bool(plan(run, pipeline * lcm(tensor, tensor * expert), pins=pins).accepted)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["p09", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("p02", "p10", "p41"))]
)
def test_files_are_planned_for_no_layout_that_plan_refuses(name: str, tmp_path: Path) -> None:
    """The product of layouts; a division of the layers that needs flags is the only one that `plan` alone offers."""
    run, differing = fixture_named(name).run, []
    experts = mcore_ckpt_ext.open_checkpoint(run).job.arguments().num_experts
    for sizes in SIZES:
        if sizes[3] > 1 and not experts:
            continue
        target = Legacy(
            **{f"{dimension}_model_parallel_size": size for dimension, size in zip(LAYOUT, sizes, strict=True)}
        )
        refused = refusal(run, target, tmp_path / "out")
        if refused is None and not accepts(run, *sizes):
            differing.append(sizes)
        if refused is not None and accepts(run, *sizes):
            assert sizes[1] == 3, (sizes, refused)  # four layers on three stages
    assert differing == []


@pytest.mark.parametrize(
    ("name", "target", "rule"),
    [
        ("p09", Legacy(expert_model_parallel_size=3), "4 experts cannot be divided by EP 3"),
        ("p10", Legacy(tensor_model_parallel_size=8), "4 attention heads cannot be divided by TP 8"),
        ("p09", TorchDist(expert_model_parallel_size=3), "4 experts cannot be divided by EP 3"),
        (
            "p10",
            Legacy(pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=2),
            "VPP 2 needs PP 2 or more",
        ),
    ],
)
def test_a_refused_layout_names_the_rule(name: str, target: Target, rule: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="refuses this layout") as refused:
        mcore_ckpt_ext.convert(fixture_named(name).run, tmp_path / "out", target)
    assert rule in str(refused.value)
    assert not any(tmp_path.iterdir())


def test_the_rehearsal_refuses_with_the_same_rule(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(fixture_named("p10").run), "--gpus", "8", "--rehearse", "tp=8"]
    assert main(command) == 1
    assert "4 attention heads cannot be divided by TP 8" in " ".join(capsys.readouterr().out.split())


def test_the_written_world_has_all_expert_ranks(tmp_path: Path) -> None:
    """The world size is a multiple of TP x PP and of EP x ETP x PP, however many ranks the source had."""
    target = Legacy(tensor_model_parallel_size=1, pipeline_model_parallel_size=2, expert_model_parallel_size=4)
    mcore_ckpt_ext.convert(fixture_named("p09").run, tmp_path / "out", target)
    layout = mcore_ckpt_ext.open_checkpoint(tmp_path / "out").job.layout
    assert (layout.expert, layout.world % 8) == (4, 0)
    assert mcore_ckpt_ext.verify(tmp_path / "out").sound


def test_verify_refuses_files_of_a_layout_that_no_release_reads(tmp_path: Path) -> None:
    """As a writer without the rules leaves them: heads that its tensor-parallel ranks cannot divide."""
    target = Legacy(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
    mcore_ckpt_ext.convert(fixture_named("p10").run, tmp_path / "out", target)
    for path in (tmp_path / "out").rglob("model_optim_rng.pt"):
        state = torch.load(path, weights_only=False)
        state["args"].num_attention_heads = 3
        torch.save(state, path)
    found = mcore_ckpt_ext.verify(tmp_path / "out", quick=True)
    assert not found.sound
    assert any("3 attention heads cannot be divided by TP 2" in finding.what for finding in found.findings)


@pytest.mark.parametrize(("name", "resumes"), [("p04", True), ("p11", False), ("p23", False)])
def test_what_megatron_wrote_shifted_is_not_resumed_by_stock(name: str, resumes: bool) -> None:
    """`plan` and `inspect` ask one function."""
    run = fixture_named(name).run
    checkpoint = mcore_ckpt_ext.open_checkpoint(run)
    assert stock_resumes(checkpoint, True, NEWEST) is resumes
    assert {one.stock_resumes for one in plan(run, 4).layouts} == {resumes}
    found = {one.who: one.layouts for one in inspect(run).resumptions}
    assert found["stock Megatron"] == ("any" if resumes else "none")


@pytest.mark.parametrize(("name", "target"), [("p08", True), ("p51", False)])
def test_stock_and_other_formats(name: str, target: bool) -> None:
    """Legacy files are read under their own layout only; torch's FSDP checkpoints fail under every layout."""
    checkpoint = mcore_ckpt_ext.open_checkpoint(fixture_named(name).run)
    assert stock_resumes(checkpoint, False, NEWEST) is target
    assert stock_resumes(checkpoint, True, NEWEST) is False


def test_optimizer_instances_share_data_parallel_ranks_which_files_do_not_fix() -> None:
    checkpoint = mcore_ckpt_ext.open_checkpoint(fixture_named("p08").run)
    arguments = checkpoint.job.arguments()
    job = replace(checkpoint.job, arguments=lambda: arguments.replace(num_distributed_optimizer_instances=2))
    checkpoint = replace(checkpoint, job=job)
    assert checkpoint.job.layout.data == 2
    assert refusal_of_stored_files(checkpoint) is None
