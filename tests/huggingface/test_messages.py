"""Tests messages: the argument with an error, the search for a tokenizer, and rounding by a job."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import checked_models
import pytest
import torch
from safetensors.torch import load_file, save_file

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import UnsupportedCheckpointError, with_indefinite_article
from mcore_ckpt_ext.families.checked import TABLE
from mcore_ckpt_ext.families.recognition import FAMILIES, family_of_config
from mcore_ckpt_ext.families.unsupported import NOT_IN_MEGATRON
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.torch_dist import writer
from mcore_ckpt_ext.model_space.tensors import LogicalTensor
from tests.harness.huggingface import make


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("num_layers=1", "Llama does not match: a decoder.layers.1."), ("num_layers=two", "num_layers: 'two'"),
        ("layernorm_epsilon=-1", "layernorm_epsilon: -1"), ("hidden_size=16", "contradict its parameters"),
        ("swiglu=false", "Llama does not match: swiglu is False, not True"),
    ],
)  # fmt: skip
def test_a_refused_argument_is_named(
    assignment: str, message: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mcore_ckpt_ext.convert(models["llama"], tmp_path / "run", mcore_ckpt_ext.Canonical())
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf", "--argument", assignment]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert f"where: {tmp_path / 'run'}, --argument {assignment}" in shown
    assert len(shown) < 900  # not a list of all families


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_tokenizer_that_is_not_there(
    name: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mcore_ckpt_ext.convert(models["llama"], tmp_path / "run", mcore_ckpt_ext.Canonical())
    (tmp_path / "empty").mkdir()
    words = ["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf", "--tokenizer", str(tmp_path / name)]
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert ("there is no such folder" if name == "nowhere" else "holds no tokenizer") in shown
    assert "such as tokenizer.json or config.json" in shown


def test_a_tied_output_layer_that_is_stored_again_is_explained(tmp_path: Path) -> None:
    make("llama3_tied", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert "lm_head.weight is not read: the output layer is tied to the embedding" in checkpoint.format.notices(
        checkpoint
    )
    assert not any(item.key == "lm_head.weight" for item in checkpoint.files.unread())


def test_articles_are_those_that_are_spoken() -> None:
    nouns = ("Ernie45", "OLMoE", "GPT2", "Llama", "lm_head.weight", "MiMo", "output_layer.weight", "mtp.layers")
    assert [with_indefinite_article(noun).split()[0] for noun in nouns] == ["an", "an", "a", "a", "an", "a", "an", "an"]


def test_listed_layers_that_are_missing_are_reported(models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models["qwen3_5"], folder)
    config = json.loads((folder / "config.json").read_text())
    message = "config.json lists multi-token prediction (MTP) layers missing from the folder (mtp_num_hidden_layers: 1)"
    for number, expected in ((1, [message]), (0, [])):
        (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": number}))
        notes = open_checkpoint(folder).format.notices(open_checkpoint(folder))
        assert [note for note in notes if "(MTP)" in note] == expected


def test_the_last_norm_has_a_state_where_a_job_may_ask_for_one(models: dict[str, Path], tmp_path: Path) -> None:
    """The final norm is Transformer Engine's if that is installed, even in the local layer spec."""
    mcore_ckpt_ext.convert(models["llama"], tmp_path / "run", mcore_ckpt_ext.TorchDist(transformer_impl="local"))
    written = open_checkpoint(tmp_path / "run").states.extra()
    assert written["decoder.final_layernorm._extra_state"].numel() == 0


def test_rounding_by_a_job_is_reported(tmp_path: Path) -> None:
    """Qwen3.5 is published in bf16 except for a few fp32 vectors; a job has a single dtype."""
    message = (
        "in float32, unlike the rest, so that a job in bfloat16 rounds them: decoder.layers.0.self_attention.A_log"
    )
    make("qwen3_5", tmp_path / "model", torch.bfloat16)
    report = mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "plain", mcore_ckpt_ext.TorchDist())
    assert not any("rounds them" in note for note in report.notes)
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    save_file({name: tensor.float() if "A_log" in name else tensor for name, tensor in stored.items()}, file)
    report = mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    assert any(note.startswith(message) for note in report.notes)


def test_a_layer_that_is_stored_more_exactly_than_others_is_not_rounded(tmp_path: Path) -> None:
    """The array of a stack has a dtype that represents all layers, here that of the last one."""
    one, source = "model.layers.1.input_layernorm.weight", tmp_path / "model"
    make("llama", source, torch.bfloat16)
    stored = load_file(source / "model.safetensors")
    stored[one] = stored[one].float() + 1e-5
    save_file(stored, source / "model.safetensors")
    report = mcore_ckpt_ext.convert(source, tmp_path / "run", mcore_ckpt_ext.TorchDist())
    assert any(note.startswith("in float32, unlike the rest") and "layers.1" in note for note in report.notes)
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name].float(), tensor.float()) for name, tensor in stored.items())


def test_codes_and_numbers_have_no_array_in_common(tmp_path: Path) -> None:
    source = tmp_path / "model"
    make("llama", source, torch.bfloat16)
    stored = load_file(source / "model.safetensors")
    stored["model.layers.1.input_layernorm.weight"] = stored["model.layers.1.input_layernorm.weight"].to(torch.uint8)
    save_file(stored, source / "model.safetensors")
    with pytest.raises(UnsupportedCheckpointError, match="does not say how; found: .*input_layernorm.weight in uint8"):
        mcore_ckpt_ext.convert(source, tmp_path / "run", mcore_ckpt_ext.TorchDist())
    tensors = [LogicalTensor("layers.0.weight", (1,), "bfloat16"), LogicalTensor("layers.1.weight", (1,), "uint8")]
    with pytest.raises(UnsupportedCheckpointError, match="in one array; found: bfloat16 and uint8"):
        writer._common_dtype(tensors)


@pytest.mark.parametrize(("kind", "why"), [("falcon", "parallel blocks"), ("mpt", "ALiBi"), ("olmo3", "it norms what")])
def test_a_family_that_megatron_core_cannot_build_is_refused_with_the_reason(kind: str, why: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=f"up to 0.19.2.*{kind}.*{why}"):
        family_of_config({"model_type": kind}, "here")


def test_no_family_is_served_and_refused() -> None:
    assert NOT_IN_MEGATRON.keys() & {family.model_type for family in FAMILIES} == set()


def test_a_type_that_computes_as_llama_under_one_condition(tmp_path: Path) -> None:
    """The reason contains a command that works."""
    make("llama", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "internlm", "bias": False}))
    source, run = str(tmp_path / "model"), str(tmp_path / "run")
    assert main(["convert", source, run, "--to", "torch_dist"]) == 2
    assert main(["convert", source, run, "--to", "torch_dist", "--family", "Llama", "--accept-key", "bias"]) == 0


def test_the_table_of_checked_models_is_as_generated() -> None:
    """The table equals the output of `scripts/checked_models.py`."""
    assert json.loads(TABLE.read_text()) == checked_models.table()


def test_the_list_of_families(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", "--list-families"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(re.search(rf"^{family.model_type} +{family.name} ", shown, re.MULTILINE) for family in FAMILIES)
    mixtral = next(line for line in shown.splitlines() if line.startswith("mixtral "))
    assert re.search(r"  Megatron +0.10 +import, export +Mixtral \(mixtral-8x7b-v0.1, .*mixtral-8x22b\)", mixtral)
    assert "falcon" in shown and "nemotron-nas" in shown
