"""Test that genuine Megatron-FSDP (`--use-megatron-fsdp`) on CPU ranks resumes converted and own checkpoints.

It also resumes checkpoints of jobs with 3D parallelism, with and without experts; `test_formats.py` tests the opposite
direction, without experts.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import assemble
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mcore_ckpt_ext import FsdpDtensor, TorchDist
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.checkouts import VARIABLE, only_for
from tests.harness.checkpoints import fixture_named
from tests.harness.fsdp import FSDP, PLUGINS, TORCH_FSDP, live_state, loading, reported
from tests.harness.jobs import OFF, RANK_SCRIPTS, SEEDED, TIME_LIMIT, Job, differing, resume
from tests.harness.layouts import SEQUENCE, Layout, expert_sizes
from tests.harness.models import GATED_EXPERTS
from tests.harness.turns import Results, Turn, run_in_turn

# One process has one job of Megatron-FSDP: torch remembers its process groups by name.
DATA_PARALLEL = Layout(tensor=1, pipeline=1, ranks=4)
DENSE = Layout(tensor=2, pipeline=1, ranks=4)  # norms and biases are on two ranks each
EXPERTS = Layout(tensor=2, pipeline=1, ranks=4, more=(*SEQUENCE, *expert_sizes(2, 1)))
THREE_DIMENSIONS = Layout(tensor=1, pipeline=2, ranks=4, more=expert_sizes(2, 1))
LAST_LEARNING_RATE = 0.0009816326530612245  # of the fourth step
# Loaded into one job one after the other: its own, the same after a way through torch_dist, legacy, a format that stock
# reshards, another model, a flat format.
ONLINE = ("p50", "back", "p08b", "p04", "p12", "p10")
# Likewise: zarr, its weights alone, a model with tied embeddings, its own, the same in torch_dist.
INTO_TORCH_FSDP = ("p32", "weights", "p12", "p51", "torch_dist")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of Megatron-FSDP that loads one checkpoint after the other, and goes on from the last of them."""
    folder = tmp_path_factory.mktemp("fsdp")
    convert(fixture_named("p50").run, folder / "torch_dist", TorchDist(megatron_version="0.19.2"))
    convert(folder / "torch_dist", folder / "back", FsdpDtensor(megatron_version="0.19.2"))
    runs = {name: folder / name if name == "back" else fixture_named(name).run for name in ONLINE}
    return resume(folder / "job", DENSE, None, more=FSDP, environment=loading(folder / "job", runs), plugins=PLUGINS)


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Experts: from 3D parallelism to Megatron-FSDP, which saves at once, and from there back; and torch's FSDP."""
    folder = tmp_path_factory.mktemp("turns")
    there, back, by_torch = folder / "there", folder / "back", folder / "by_torch"
    runs = {"p09": fixture_named("p09").run}
    convert(fixture_named("p51").run, folder / "torch_dist", TorchDist(megatron_version="0.19.2"))
    for_torch = {name: fixture_named(name).run for name in INTO_TORCH_FSDP if name[0] == "p"}
    for_torch |= {"weights": for_torch["p32"], "torch_dist": folder / "torch_dist"}
    turns = [
        Turn(there, EXPERTS, saves=True, more=[*GATED_EXPERTS, *FSDP], environment=loading(there, runs)),
        Turn(
            by_torch, DATA_PARALLEL, saves=True, until=8, more=TORCH_FSDP, optimizer=[],
            environment=loading(by_torch, {name: for_torch[name] for name in INTO_TORCH_FSDP}),
        ),
        Turn(back, THREE_DIMENSIONS, load=there / "checkpoints", more=GATED_EXPERTS),
    ]  # fmt: skip
    return run_in_turn(folder, turns, PLUGINS)


def test_training_goes_on_in_the_other_world(resumed: Job) -> None:
    """With the loss of the job that was not interrupted, but for the order of its sums."""
    record = fixture_named(ONLINE[-1]).job["losses"]
    expected = {one["iteration"]: one["loss"]["lm loss"] for one in record if one["iteration"] == 5}
    assert resumed.losses == pytest.approx(expected, abs=2e-4)


def assert_lives(job: Job, name: str, written: str, *, weights: bool = False) -> None:
    """After a load, the masters and moments of the job are those of the job that wrote, whatever was there before.

    `weights`: whether it has weights beside its masters.
    """
    truth = {key: value for key, value in fixture_named(written).truth.items() if weights or key[:6] != "weight"}
    live = {key: value for key, value in live_state(job.folder, name).items() if weights or key[:6] != "weight"}
    assert differing(truth, live) == []
    groups = [{"wd_mult": decay, "step": 4, "lr": LAST_LEARNING_RATE} for decay in (1.0, 0.0)]
    assert reported(job.folder, name) == {"error": None, "iteration": 4, "groups": groups, "steps": 32}


@pytest.mark.parametrize("name", [name for name in ONLINE if name != "p12"])
def test_megatron_fsdp_has_every_bit_of_3d_parallelism(resumed: Job, name: str) -> None:
    assert_lives(resumed, name, "p50" if name == "back" else name)


@pytest.mark.nightly
def test_experts_go_there_and_back(in_turn: Results) -> None:
    """TP2 x EP2 of Megatron-FSDP has every bit of TP1 x PP2 x EP2, and so has such a job of what that saves."""
    job, back = in_turn.job("there"), in_turn.job("back")
    assert_lives(job, "p09", "p09")
    (line,) = job.said_of_loads
    assert line.endswith(f" s; {SEEDED}")
    assert "random state" not in line.removesuffix(SEEDED)
    assert "resumed from TP1 x PP2 x EP2 x DP4 by Megatron-FSDP: torch_dist, dp_reshardable" in line
    assert verify(job.run).sound
    assert differing(fixture_named("p09").truth, assemble(back.at_load)) == []


def test_a_mismatched_model_is_refused_on_all_ranks(resumed: Job) -> None:
    error = reported(resumed.folder, "p12")["error"]
    assert "ResumeRefusedError" in error
    assert "rank 0 to 3: ModelMismatchError: the job has state that the checkpoint lacks" in error
    assert "decoder.layers.2.input_layernorm.weight" in error


def test_one_line_says_what_was_resumed(resumed: Job) -> None:
    """Its own format is left to stock."""
    assert [line.partition(" s; ")[0].rpartition(", ")[0] for line in resumed.said_of_loads] == [
        "[rank 0] [mcore_ckpt_ext] model and optimizer resumed from TP1 x PP4 x DP2 by Megatron-FSDP: "
        f"{form}, 0.7 MB read, 57,856 masters verified equal to their weights"
        for form in ("torch, legacy_torch", "torch_dist, fully_reshardable", "torch_dist, dp_reshardable")
    ]
    about_random_states = [line for line in resumed.said if "random state" in line]
    assert [line.count("random state") for line in about_random_states] == [1] * 4, "said once by each load that seeds"
    assert all(line.endswith(SEEDED) for line in about_random_states)
    assert set(resumed.said_of_loads) < set(about_random_states)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["p32", "p51", "torch_dist"])
def test_torch_fsdp_has_every_bit_of_3d_parallelism(in_turn: Results, name: str) -> None:
    """And of its own checkpoint, which stock Megatron 0.19.2 fails on: Adam's step, too."""
    assert_lives(in_turn.job("by_torch"), name, "p51" if name == "torch_dist" else name, weights=True)


@pytest.mark.nightly
def test_torch_fsdp_trains_on_and_saves(in_turn: Results) -> None:
    job = in_turn.job("by_torch")
    assert reported(job.folder, "p12")["error"].count("the embeddings of the checkpoint are tied") == 1
    assert "output_layer.weight" in reported(job.folder, "p12")["error"]
    assert [line.partition(": ")[2].partition(", 0.")[0] for line in job.said_of_loads] == [
        "zarr, dp_zero_gather_scatter",
        "zarr, alone",
        "torch_dcp, no_distributed_optimizer",
        "torch_dist, no_distributed_optimizer",
    ]
    assert [line.endswith(SEEDED) for line in job.said_of_loads] == [True, True, False, False]
    assert [line for line in job.said if "random state" in line] == job.said_of_loads
    assert verify(job.run).sound


@pytest.mark.nightly
def test_torch_fsdp_takes_weights_alone(in_turn: Results) -> None:
    """Under --no-load-optim, and makes its masters of them."""
    truth = {name: value for name, value in fixture_named("p32").truth.items() if name.startswith("weight.")}
    live = live_state(in_turn.job("by_torch").folder, "weights")
    assert differing(truth, {name: live[name] for name in truth}) == []
    masters = {name.replace("weight.", "fp32_param.", 1): value.float() for name, value in truth.items()}
    assert differing(masters, {name: live[name] for name in masters}) == []


@only_for("0.19", "0.20")
@pytest.mark.parametrize(("name", "version", "master"), [("p21", "0.18.0", ".param"), ("p22", "0.14.0", ".fp32_param")])
def test_the_converter_of_megatron_agrees(name: str, version: str, master: str, tmp_path: Path) -> None:
    """From one source it writes the same names and moments; masters, which it files away, are the main weights here.

    It wants a `common.pt`, which 0.18 was the last to write, and fails on experts in `fully_reshardable`. Up to 0.17 it
    takes the default of an option, "{}", for the name of a file.
    """
    checkout = Path(os.environ[VARIABLE])
    tool = checkout / "tools" / "checkpoint" / "checkpoint_inspector.py"
    convert(fixture_named(name).run, tmp_path / "source", TorchDist(megatron_version=version))
    convert(fixture_named(name).run, tmp_path / "ours", FsdpDtensor(megatron_version="0.19.0"))
    words = ["convert-torch-dist-to-fsdp-dtensor", "--swiglu", str(tmp_path / "source" / "iter_0000004")]
    ran = launch.run(
        1, tool, [*words, str(tmp_path / "theirs")], timeout=TIME_LIMIT, megatron=checkout, environment=OFF,
        plugin_files=[RANK_SCRIPTS / "inspector_on_cpu.py"],
    )  # fmt: skip
    assert ran.returncode == 0, ran.output[-6000:]
    theirs, ours = arrays_in(tmp_path / "theirs"), arrays_in(tmp_path / "ours" / "iter_0000004")
    masters = {key: theirs.pop(key) for key in list(theirs) if key.endswith(master)}
    assert theirs.keys() == ours.keys()
    for key, array in ours.items():
        is_weight = key.startswith("model.")
        assert torch.equal(array.to(theirs[key].dtype), theirs[key]), key
        if is_weight and "router" not in key:
            assert torch.equal(array, masters[f"optimizer.state.module.module.{key.removeprefix('model.')}{master}"]), (
                key
            )
    assert compare(fixture_named(name).run, tmp_path / "theirs").equal


def arrays_in(folder: Path) -> dict[str, torch.Tensor]:
    """By torch's own reader."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found
