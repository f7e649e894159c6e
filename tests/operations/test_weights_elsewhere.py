"""Test an optimizer that was saved without weights, with a folder of weights that the user names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_ckpt_ext import HuggingFace, TorchDist
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import ModelMismatchError, ProofError, UnsupportedCheckpointError, UsageError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.job.facts import Facts
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.checkpoints import assert_is_the_truth, fixture_named, optimizer_alone

# Every row of the vocabulary: what a tokenizer does not need is in no Hugging Face folder otherwise.
_WHOLE = {"p02": 256}


def hugging_face(name: str, folder: Path) -> Path:
    convert(fixture_named(name).run, folder, HuggingFace(vocab_size=_WHOLE.get(name)))
    return folder


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    return optimizer_alone("p02", tmp_path / "alone")


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "layout"), [
    ("p01", "TP1 x PP4 (VPP, CP, DP not known)"), ("p02", "TP2 x PP2 (VPP, CP, DP not known)"), ("p04", "not known"),
])  # fmt: skip
def test_a_hugging_face_folder(name: str, layout: str, tmp_path: Path) -> None:
    """Gradient buffers, whose layout nothing tells, and model space; every element is that of the live job."""
    folder = optimizer_alone(name, tmp_path / "alone")
    weights = hugging_face(name, tmp_path / "weights")
    assert inspect(folder, weights=weights).layout_text == layout
    assert_is_the_truth(open_checkpoint(folder, weights=weights), fixture_named(name))
    verified = verify(folder, weights=weights)
    assert verified.sound
    (masters,) = (
        int(check.extent.partition(" ")[0].replace(",", "")) for check in verified.checks if check.name == "masters"
    )
    assert masters == sum(
        tensor.numel() for key, tensor in fixture_named(name).truth.items() if key.startswith("fp32_param.")
    )
    report = convert(folder, tmp_path / "out", TorchDist(megatron_version="0.16"), weights=weights)
    assert report.proven_elements >= masters
    assert f"the weights are those of {weights}" in report.notes
    assert compare(fixture_named(name).run, tmp_path / "out").tensors_equal  # optimizer only has no scheduler


def test_a_config_json_that_describes_another_model(tmp_path: Path) -> None:
    """The tensors are the same; what they mean is not."""
    folder, weights = optimizer_alone("p05", tmp_path / "alone"), hugging_face("p05", tmp_path / "weights")
    shutil.copy(fixture_named("p05").iteration / "common.pt", folder)  # with the arguments of the job
    assert compare(fixture_named("p05").run, folder, weights=weights).equal
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 0.1}))
    with pytest.raises(ModelMismatchError, match="is 1e-05, not 0.1"):
        open_checkpoint(folder, weights=weights)


@pytest.mark.parametrize("name", ["p21", "p22", "p41"])
def test_another_checkpoint(name: str, tmp_path: Path) -> None:
    """It may be of any layout: how the optimizer's job had cut the weights follows from Megatron's rules."""
    folder = optimizer_alone(name, tmp_path / "alone")
    convert(fixture_named(name).run, tmp_path / "weights", TorchDist(), drop=["optimizer"])
    assert_is_the_truth(open_checkpoint(folder, weights=tmp_path / "weights"), fixture_named(name))


def test_experts_under_the_names_of_either_spec(tmp_path: Path) -> None:
    """What nothing shows is stated."""
    folder, weights = optimizer_alone("p09", tmp_path / "alone"), hugging_face("p09", tmp_path / "weights")
    with pytest.raises(ProofError, match="under no layout that its buffers allow"):
        open_checkpoint(folder, weights=weights)
    stated = Facts(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=1,
        expert_model_parallel_size=2, expert_tensor_parallel_size=1,
    )  # fmt: skip
    assert compare(fixture_named("p09").run, folder, facts=stated, weights=weights).tensors_equal
    model_space, gpt = optimizer_alone("p05", tmp_path / "p05"), hugging_face("p05", tmp_path / "gpt")
    assert compare(fixture_named("p05").run, model_space, weights=gpt).tensors_equal


def test_the_command_line(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, out = str(hugging_face("p02", tmp_path / "weights")), str(tmp_path / "out")
    assert main(["inspect", str(alone)]) == 0
    assert "optimizer only; pass the folder of its weights" in capsys.readouterr().out
    assert main(["inspect", str(alone), "--weights", weights, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"]["parameters"], found["model"]["attention heads"]) == (53536, 4)
    assert {file["rank"] for file in found["files"] if file["file"].startswith(weights)} == {None}
    assert main(["verify", str(alone), "--weights", weights]) == 0
    assert "53,536 masters equal to their weights" in capsys.readouterr().out
    assert main(["convert", str(alone), out, "--to", "torch_dist", "--weights", weights]) == 0
    assert "masters round to their weights" in capsys.readouterr().out
    assert main(["diff", str(alone), str(fixture_named("p02").run), "--weights", weights, "--tensors-only"]) == 0
    assert main(["diff", str(alone), str(alone), "--weights", weights]) == 0


def test_without_them_it_is_refused_with_a_hint(alone: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="without weights.*--weights FOLDER"):
        convert(alone, tmp_path / "out", TorchDist())
    with pytest.raises(UnsupportedCheckpointError, match="without weights.*--weights FOLDER"):
        compare(alone, fixture_named("p02").run)
    (wrong,) = (finding for finding in verify(alone).findings if finding.severity == "error")
    assert "--weights FOLDER" in wrong.what


def test_a_padded_vocabulary_is_in_no_hugging_face_folder(alone: Path, tmp_path: Path) -> None:
    shutil.copy(fixture_named("p02").iteration / "common.pt", alone)  # with the arguments of the job
    convert(fixture_named("p02").run, tmp_path / "weights", HuggingFace())
    with pytest.raises(UnsupportedCheckpointError, match=r"256 rows, of which \d+ are padding.*--weights RUN"):
        open_checkpoint(alone, weights=tmp_path / "weights")


def test_weights_of_another_step(alone: Path, tmp_path: Path) -> None:
    """One flipped bit is seen where it is moved; a model of other numbers, before anything is."""
    weights = hugging_face("p02", tmp_path / "weights")
    (file,) = weights.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.2.mlp.down_proj.weight"][7, 7] *= 2
    save_file(tensors, file, {"format": "pt"})
    found = verify(alone, weights=weights)
    assert [finding.where for finding in found.findings if finding.severity == "error"] == [
        "fp32_param decoder.layers.2.mlp.linear_fc2.weight"
    ]
    with pytest.raises(ProofError, match=r"decoder.layers.2.mlp.linear_fc2.weight"):
        convert(alone, tmp_path / "out", TorchDist(), weights=weights)
    assert not (tmp_path / "out").exists()
    save_file({key: torch.randn_like(tensor) for key, tensor in tensors.items()}, file, {"format": "pt"})
    with pytest.raises(ProofError, match="do not belong to this optimizer"):
        convert(alone, tmp_path / "out", TorchDist(), weights=weights)
    assert not verify(alone, weights=weights).sound


def test_rows_that_a_job_pads_with(alone: Path, tmp_path: Path) -> None:
    convert(fixture_named("p02").run, tmp_path / "weights", HuggingFace())
    with pytest.raises(ProofError, match="a Hugging Face folder has no padding"):
        convert(alone, tmp_path / "out", TorchDist(), weights=tmp_path / "weights")


@pytest.mark.parametrize("name", ["p42", "p47"])
def test_optimizers_that_weights_cannot_verify_are_refused(name: str, tmp_path: Path) -> None:
    """Weights that are the masters, and remainders, which go with any weights."""
    folder = optimizer_alone(name, tmp_path / "alone")
    with pytest.raises(UnsupportedCheckpointError, match="cannot be verified against this optimizer"):
        open_checkpoint(folder, weights=fixture_named(name).run)


def test_where_they_make_no_sense(alone: Path, tmp_path: Path) -> None:
    run = fixture_named("p02").run
    with pytest.raises(UsageError, match="a checkpoint with its own weights"):
        verify(run, weights=run)
    with pytest.raises(UsageError, match="has no weights"):
        inspect(alone, weights=alone)
    with pytest.raises(UsageError, match="an optimizer in a distributed checkpoint; found: torch;"):
        inspect(fixture_named("p08").run, weights=run)
    with pytest.raises(UsageError, match="its own weights"):
        compare(run, run, weights=run)
