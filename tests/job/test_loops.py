"""Test checkpoints of loops that store no arguments of Megatron: which ones are known, and from where."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mcore_ckpt_ext import Canonical, HuggingFace, Legacy, TorchDist
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError, UnsupportedCheckpointError, UsageError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.torch_dist.inference import infer_layout, infer_model_config
from mcore_ckpt_ext.job.facts import Facts
from mcore_ckpt_ext.job.loops.bridge import harmless
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.checkpoints import FIXTURES, Fixture, everything_in, fixture_named

MASTERS = 53536


@pytest.fixture
def bridge(tmp_path: Path) -> Fixture:
    """A copy of the folder that Megatron-Bridge's classes describe."""
    return fixture_named("p49").copy_to(tmp_path / "copy")


def edit_run_config(fixture: Fixture, change: Callable[[dict[str, Any]], object]) -> None:
    path = fixture.iteration / "run_config.yaml"
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content))


def edit_index(fixture: Fixture, is_gone: Callable[[str], bool]) -> None:
    """Take entries out of the index, as if no rank had written them."""
    path = fixture.iteration / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for key in [key for key in metadata.state_dict_metadata if is_gone(key)]:
        del metadata.state_dict_metadata[key]
    path.write_bytes(pickle.dumps(metadata))


def test_the_job_is_known_by_run_config_and_index() -> None:
    found = inspect(fixture_named("p49").run)
    truth = fixture_named("p49").job
    assert found.layout_text == "TP2 x PP2 x DP2"
    assert (found.layout["world"], found.described_by) == (truth["world_size"], "run_config.yaml")
    assert found.writer.version == "Megatron-Bridge on Megatron Core 0.15 to 0.18"
    assert found.model["layers"] == 4
    assert found.training["consumed_train_samples"] == 32
    # Its ConfigContainer was filled in by hand, and says that gradients are bf16; the buffers' names say fp32.
    assert found.unbelieved == (
        "run_config.yaml has accumulate_allreduce_grads_in_fp32 False, but the index has True, which is used",
    )
    assert [(who.who, who.layouts) for who in found.resumptions][:2] == [
        ("Megatron-Bridge", "its own: TP2 x PP2 x DP2; another DP if the gradient buffers stay the same"),
        ("stock Megatron", "none"),
    ]


def test_everything_equals_the_truth() -> None:
    found, truth = everything_in(open_checkpoint(fixture_named("p49").run)), fixture_named("p49").truth
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], truth[name]) for name in truth)
    assert verify(fixture_named("p49").run).sound


def test_without_its_description_the_index_still_shows_the_layout(bridge: Fixture) -> None:
    """The grid of random states; CP, and with it DP, is not known, since nothing shows it."""
    (bridge.iteration / "run_config.yaml").unlink()
    found = inspect(bridge.run)
    assert found.layout_text == "TP2 x PP2 (VPP, CP, DP not known)"
    assert found.layout == {
        "TP": 2, "PP": 2, "VPP": None, "EP": 1, "ETP": 2, "CP": None, "DP": None, "world": 8,
    }  # fmt: skip
    assert found.described_by == ""
    assert verify(bridge.run).sound
    assert compare(bridge.run, fixture_named("p49").run).equal
    notes = convert(bridge.run, bridge.folder / "out", TorchDist()).notes
    assert "num_attention_heads of the job, which stock Megatron requires, is unknown" in notes
    facts = Facts(context_parallel_size=1, virtual_pipeline_model_parallel_size=1)
    assert inspect(bridge.run, facts=facts).layout_text == "TP2 x PP2 x DP2"


def test_nothing_is_inferred_if_only_a_later_optimizer_is_flat() -> None:
    index = open_checkpoint(fixture_named("p09").run).files.index()
    assert index is not None
    arrays = {key: array for key, array in index.arrays.items() if not key.startswith("chained_0.")}
    assert any(key.startswith("chained_1.") for key in arrays)
    objects = {key: stored for key, stored in index.objects.items() if not key.startswith("chained_0.")}
    without_first = replace(index, arrays=arrays, objects=objects)
    assert infer_layout(without_first, None, {"tensor_model_parallel_size": 1}) == {}


@pytest.mark.parametrize("with_grid", [True, False])
@pytest.mark.parametrize(
    "name", [name for name in FIXTURES if "zarr" not in name and name[:3] not in ("p08", "p50", "p51")]
)
def test_values_inferred_from_the_index_are_right(name: str, with_grid: bool) -> None:
    """Of every checkpoint that has arguments of its own: nothing that it shows differs from them."""
    checkpoint = open_checkpoint(fixture_named(name).run)
    index = checkpoint.files.index()
    assert index is not None
    recorded = checkpoint.job.arguments().raw
    grid = checkpoint.states.random_grid() if with_grid else None
    shown = infer_layout(index, grid, {"context_parallel_size": recorded["context_parallel_size"]})
    assert shown == {size: recorded[size] for size in shown}
    if with_grid or checkpoint.optimizer.format() == "dp_reshardable":
        assert {"tensor_model_parallel_size", "pipeline_model_parallel_size"} <= shown.keys()
    of_model = infer_model_config(index.arrays, checkpoint.names("weight"))
    assert of_model == {size: recorded[size] for size in of_model}


def test_an_optimizer_alone_does_not_say_whether_embeddings_are_tied(bridge: Fixture) -> None:
    (bridge.iteration / "run_config.yaml").unlink()
    assert inspect(bridge.iteration).model["embeddings"] == "untied"
    edit_index(bridge, lambda key: not key.startswith(("optimizer", "rng_state")))
    assert "embeddings" not in inspect(bridge.iteration).model


def test_values_without_a_source_are_unknown(bridge: Fixture, tmp_path: Path) -> None:
    """Neither is a default shown as a fact, nor are buffers cut by one; weights can be had, and facts help."""
    (bridge.iteration / "run_config.yaml").unlink()
    edit_index(bridge, lambda key: key.startswith(("rng_state", "embedding.", "output_layer.")))
    found = inspect(bridge.run)
    assert found.layout_text == "not known"
    assert found.layout["TP"] is found.layout["PP"] is found.layout["world"] is None
    assert {file.place for file in found.files} == {"not known"}
    assert found.stages == ()
    with pytest.raises(
        UnsupportedCheckpointError, match=r"parallel layout that they were written under .* pass the layout: --tensor"
    ):
        convert(bridge.run, tmp_path / "out", Canonical())
    assert verify(bridge.run).sound  # nothing is wrong with what is not looked at
    convert(bridge.run, tmp_path / "weights", Canonical(), drop=["optimizer"])
    with pytest.raises(UsageError, match="--tensor-model-parallel-size, --pipeline-model-parallel-size"):
        convert(bridge.run, tmp_path / "legacy", Legacy(), drop=["optimizer"])


@pytest.mark.parametrize("said", [
    {"tensor_model_parallel_size": 4}, {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4},
], ids=str)  # fmt: skip
def test_a_description_that_lies(bridge: Fixture, said: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks made the index, so it counts; the contradiction is reported."""
    edit_run_config(bridge, lambda content: content["model"].update(said))
    assert str(open_checkpoint(bridge.run).job.layout) == "TP2 x PP2 x DP2"
    for name, size in said.items():
        message = f"run_config.yaml has {name} {size}, but the index has 2, which is used"
        assert message in inspect(bridge.run).unbelieved
        assert message in [finding.what for finding in verify(bridge.run, quick=True).findings]
    assert main(["inspect", str(bridge.run)]) == 0
    assert "which is used" in capsys.readouterr().out
    assert verify(bridge.run).sound


@pytest.mark.parametrize("text", [
    "", "model: 3", "model: {a: !!python/name:os.system x}", "[" * 100_000, "model: {num_layers: -1}",
    "model: {num_layers: true}", "model: {num_layers: 4",
])  # fmt: skip
def test_a_description_that_is_none(bridge: Fixture, text: str) -> None:
    (bridge.iteration / "run_config.yaml").write_text(text)
    found = inspect(bridge.run)
    assert found.layout_text == "TP2 x PP2 (VPP, CP, DP not known)"
    assert any(problem.startswith("run_config.yaml is ignored: ") for problem in found.unbelieved)
    assert verify(bridge.run, quick=True).sound


def test_a_description_next_to_megatrons_arguments(tmp_path: Path) -> None:
    """They count; that the file says something else, or nothing, is reported."""
    copied = fixture_named("p02").copy_to(tmp_path / "copy")
    config = copied.iteration / "run_config.yaml"
    said = (fixture_named("p49").iteration / "run_config.yaml").read_text()
    config.write_text(said)
    assert not verify(copied.run, quick=True).findings
    config.write_text(said.replace("num_layers: 4", "num_layers: 5"))
    message = "run_config.yaml has num_layers 5, but Megatron's arguments have 4, which is used"
    assert [finding.what for finding in verify(copied.run, quick=True).findings] == [message]
    assert inspect(copied.run).model["layers"] == 4
    config.write_text("model: {")
    (finding,) = verify(copied.run, quick=True).findings
    assert finding.what.startswith("run_config.yaml is ignored: ")


def test_an_optimizer_without_its_groups_is_not_sound(bridge: Fixture, tmp_path: Path) -> None:
    edit_index(bridge, lambda key: key.endswith(".optimizer/shard_0_1"))
    found = verify(bridge.run)
    assert [finding.what for finding in found.findings if finding.severity == "error"] == [
        "the optimizer has no parameter groups: its step and other settings are missing"
    ]
    with pytest.raises(UnsupportedCheckpointError, match="no parameter groups"):
        convert(bridge.run, tmp_path / "out", TorchDist())


def test_counts_that_cannot_be_read(bridge: Fixture) -> None:
    (bridge.iteration / "train_state.pt").write_bytes(b"no archive")
    found = inspect(bridge.run)
    assert "consumed_train_samples" not in found.training
    assert any(problem.startswith("train_state.pt is ignored: ") for problem in found.unbelieved)


def test_facts_may_not_contradict(bridge: Fixture) -> None:
    with pytest.raises(
        UsageError, match=r"index contradicts the option; found: --tensor-model-parallel-size 4; expected: 2"
    ):
        verify(bridge.run, facts=Facts(tensor_model_parallel_size=4))
    for name in ("p02", "p08"):
        with pytest.raises(UsageError, match="records the layout"):
            inspect(fixture_named(name).run, facts=Facts(tensor_model_parallel_size=2))
    with pytest.raises(UsageError, match="whole number of 1 or more"):
        Facts(pipeline_model_parallel_size=0)
    assert compare(bridge.run, fixture_named("p02").run, facts=Facts(context_parallel_size=1), kinds=["weight"]).equal


@pytest.mark.thorough
def test_both_directions(tmp_path: Path) -> None:
    """To Megatron and back to Megatron-Bridge: every element is the same, and each loop finds what it asks for."""
    run = fixture_named("p49").run
    steps = {
        "megatron": (run, TorchDist()), "bridge": (run, TorchDist(loop="bridge")), "legacy": (run, Legacy()),
        "again": (tmp_path / "bridge", TorchDist(loop="bridge", megatron_version="0.16.1")),
        "back": (tmp_path / "megatron", TorchDist(loop="bridge")),
    }  # fmt: skip
    for name, (source, target) in steps.items():
        assert convert(source, tmp_path / name, target).proven_elements >= MASTERS  # of copies, each
        assert verify(tmp_path / name).sound
        assert compare(run, tmp_path / name).equal, name
    args = open_checkpoint(tmp_path / "megatron").job.args
    assert (args["num_layers"], args["hidden_size"], args["num_attention_heads"]) == (4, 32, 4)
    assert (args["tensor_model_parallel_size"], args["consumed_train_samples"]) == (2, 32)
    assert open_checkpoint(tmp_path / "legacy").job.layout.tensor == 2
    for name in ("bridge", "again", "back"):
        assert_bridge_resumes(tmp_path / name)
    assert (
        yaml.safe_load((run / "iter_0000004" / "run_config.yaml").read_text())["train"]
        == (yaml.safe_load((tmp_path / "again" / "iter_0000004" / "run_config.yaml").read_text())["train"])
    )


def assert_bridge_resumes(run: Path) -> None:
    """What `load_checkpoint` of Megatron-Bridge reads, as it reads it."""
    iteration = run / "iter_0000004"
    config = yaml.safe_load((iteration / "run_config.yaml").read_text())
    assert (config["model"]["tensor_model_parallel_size"], config["model"]["pipeline_model_parallel_size"]) == (2, 2)
    expected = {"save_optim": True, "save_rng": True, "fully_parallel_save": True}
    assert {name: config["checkpoint"][name] for name in expected} == expected
    for path in (iteration / "train_state.pt", run / "latest_train_state.pt"):
        state = torch.load(path, weights_only=True)
        assert (int(state["step"]), int(state["consumed_train_samples"])) == (4, 32)
        assert {name: tensor.dtype for name, tensor in state.items()} == {
            "step": torch.int64, "consumed_train_samples": torch.int64, "skipped_train_samples": torch.int64,
            "consumed_valid_samples": torch.int64, "floating_point_operations_so_far": torch.float64,
            "do_train": torch.bool, "do_valid": torch.bool, "do_test": torch.bool,
        }  # fmt: skip
    assert "args" not in open_checkpoint(run).job.common()


def test_of_megatrons_own_checkpoint(tmp_path: Path) -> None:
    """Its model class follows from its family; a model of none has no class, and that is said."""
    report = convert(fixture_named("p02").run, tmp_path / "llama", TorchDist(loop="bridge"))
    assert not [note for note in report.notes if "run_config" in note]
    model = yaml.safe_load((tmp_path / "llama" / "iter_0000004" / "run_config.yaml").read_text())["model"]
    assert model["_target_"] == "megatron.bridge.models.gpt_provider.GPTModelProvider"
    assert (model["vocab_size"], model["should_pad_vocab"]) == (256, False)
    assert_bridge_resumes(tmp_path / "llama")
    report = convert(fixture_named("p22").run, tmp_path / "other", TorchDist(loop="bridge"))
    assert any("AutoBridge cannot export it" in note for note in report.notes)
    assert not [
        note
        for note in convert(tmp_path / "other", tmp_path / "back", TorchDist()).notes
        if "of the job, which stock Megatron requires" in note
    ]
    kept, of_source = (
        open_checkpoint(tmp_path / "back").job.arguments(),
        open_checkpoint(fixture_named("p22").run).job.arguments(),
    )
    for name in (
        "num_attention_heads",
        "num_query_groups",
        "num_experts",
        "moe_ffn_hidden_size",
        "swiglu",
        "normalization",
    ):
        assert kept.value(name) == of_source.value(name), name


def test_a_checkpoint_written_for_bridge_is_recognized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither is its writer a riddle, nor is it suspected of what Megatron did; its tokens are those of the source."""
    run = fixture_named("p02").run
    convert(run, tmp_path / "bridge", TorchDist(loop="bridge", megatron_version="0.19.2"))
    found = inspect(tmp_path / "bridge")
    assert found.writer.version == "mcore-ckpt convert, for Megatron-Bridge on Megatron 0.19"
    assert main(["inspect", str(tmp_path / "bridge")]) == 0
    shown = capsys.readouterr().out
    assert "contradict" not in shown
    assert "shifted" not in shown
    assert open_checkpoint(tmp_path / "bridge").job.tokens == open_checkpoint(run).job.tokens == 128
    convert(tmp_path / "bridge", tmp_path / "back", TorchDist())
    assert inspect(tmp_path / "back").writer.version.startswith("mcore-ckpt convert, for Megatron 0.")
    assert "mcore_ckpt_ext_written_for" not in open_checkpoint(tmp_path / "back").job.common()


def test_a_broken_description_is_named_where_it_is_missed(bridge: Fixture, tmp_path: Path) -> None:
    (bridge.iteration / "run_config.yaml").write_text("model: {num_layers: 4")
    with pytest.raises(CheckpointError, match=r"\(run_config.yaml is ignored: "):
        convert(bridge.run, tmp_path / "hf", HuggingFace())
    edit_index(bridge, lambda key: key.startswith(("rng_state", "embedding.", "output_layer.")))
    for target in (Canonical(), TorchDist(loop="bridge")):
        with pytest.raises(UnsupportedCheckpointError, match=r"\(run_config.yaml is ignored: .*pass the layout"):
            convert(bridge.run, tmp_path / "out", target)


def test_a_description_that_explodes(bridge: Fixture, tmp_path: Path) -> None:
    """Whoever wrote it meant no good, whatever the rest of the checkpoint looks like."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    (bridge.iteration / "run_config.yaml").write_text("\n".join([*lines, "model: {num_layers: 4}"]))
    found = verify(bridge.run)
    assert not found.sound
    assert any("requires far more work than its size allows" in finding.what for finding in found.findings)
    with pytest.raises(UnreadableCheckpointError, match=r"far more work than its size allows.*run_config.yaml"):
        convert(bridge.run, tmp_path / "out", TorchDist())


def test_facts_are_repeated_as_they_were_typed(bridge: Fixture, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = str(bridge.run), str(bridge.folder / "out")
    assert main(["convert", run, out, "--to", "torch_dist", "--source-tensor-model-parallel-size", "4"]) == 2
    assert "found: --source-tensor-model-parallel-size 4;" in capsys.readouterr().err
    assert main(["verify", run, "--tensor-model-parallel-size", "4"]) == 2
    assert "found: --tensor-model-parallel-size 4;" in capsys.readouterr().err
    assert (
        main(["convert", str(fixture_named("p02").run), out, "--to", "legacy", "--source-context-parallel-size", "1"])
        == 2
    )
    assert "found: --source-context-parallel-size 1;" in capsys.readouterr().err


def test_hugging_face(tmp_path: Path) -> None:
    """The model that run_config.yaml describes is the one that Megatron's arguments describe."""
    for name in ("p49", "p02"):
        convert(fixture_named(name).run, tmp_path / name, HuggingFace())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("p49", "p02")]
    assert configs[0] == configs[1]
    assert compare(tmp_path / "p49", fixture_named("p49").run).equal


def test_code_that_megatron_bridge_would_run_is_not_carried(bridge: Fixture, tmp_path: Path) -> None:
    """It imports what `_target_` names, and calls it."""
    edit_run_config(bridge, lambda content: content["model"].update(init_method={"_target_": "os.system", "a": 1}))
    report = convert(bridge.run, tmp_path / "out", TorchDist(loop="bridge"))
    assert any("model.init_method, which Megatron-Bridge would run" in note for note in report.notes)
    config = yaml.safe_load((tmp_path / "out" / "iter_0000004" / "run_config.yaml").read_text())
    assert config["model"]["init_method"] is None
    assert config["model"]["output_layer_init_method"]["_target_"] == "torch.nn.init.normal_"


@pytest.mark.parametrize("node", [
    {"_target_": "os.system"}, {"_target_": "torch.load", "_call_": False}, {"_target_": "megatron.bridge.utils.run"},
    {"_target_": ["os.system"]}, {"_target_": "torch.hub.load", "_partial_": True}, {"_target_": "megatron.core..x"},
], ids=str)  # fmt: skip
def test_allowed_names(node: dict[str, object]) -> None:
    assert harmless({"a": [{"b": node}]}) == ({"a": [{"b": None}]}, ["a.0.b"])
    dtype = {"_target_": "torch.bfloat16", "_call_": False}
    kept = {"_target_": "megatron.bridge.training.config.ConfigContainer", "c": dtype}
    assert harmless(kept) == (kept, [])
