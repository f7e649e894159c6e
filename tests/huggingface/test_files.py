"""Tests which files of a folder are read and copied, and which content is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.families.recognition import family_of_config
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from tests.harness.huggingface import CONFIGS, VOCABULARY


def test_a_value_that_float16_does_not_hold(models: dict[str, Path], tmp_path: Path) -> None:
    for name, tensor in (("llama", "model.norm.weight"), ("gpt2", "transformer.h.0.mlp.c_fc.weight")):
        shutil.copytree(models[name], tmp_path / name)
        file = tmp_path / name / "model.safetensors"
        tensors = load_file(file)
        tensors[tensor].view(-1)[3] = 1e6
        save_file(tensors, file)
        run = tmp_path / f"{name}-run"
        mcore_ckpt_ext.convert(tmp_path / name, run, mcore_ckpt_ext.TorchDist())
        with pytest.raises(UnsupportedCheckpointError, match=r"is too large for float16.*found: 1e\+06"):
            mcore_ckpt_ext.convert(run, tmp_path / "half", mcore_ckpt_ext.HuggingFace(dtype="float16"))
        tensors[tensor].view(-1)[3] = float("inf")  # infinite values are kept
        save_file(tensors, file)
        mcore_ckpt_ext.convert(tmp_path / name, run, mcore_ckpt_ext.TorchDist(), force=True)
        mcore_ckpt_ext.convert(run, tmp_path / f"{name}-half", mcore_ckpt_ext.HuggingFace(dtype="float16"))


def test_safetensors_are_preferred_to_a_pickle(models: dict[str, Path], tmp_path: Path) -> None:
    """Several safetensors files have precedence over a pytorch_model.bin, which may be old, as in transformers."""
    model = AutoModelForCausalLM.from_pretrained(models["llama"])
    model.save_pretrained(tmp_path / "model", max_shard_size="30KB")
    torch.save({"model.norm.weight": torch.zeros(32)}, tmp_path / "model" / "pytorch_model.bin")
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "model" / "consolidated.safetensors")
    report = mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    strays = "consolidated.safetensors, pytorch_model.bin"
    assert f"ignored weights in the folder, since other files take precedence: {strays}" in report.notes
    found = open_checkpoint(tmp_path / "run").tensor("weight", "decoder.final_layernorm.weight")
    assert torch.equal(found.read(), model.model.norm.weight)


def test_weights_without_a_configuration(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["llama"], tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(UnreadableCheckpointError, match=r"no configuration; expected: config\.json"):
        open_checkpoint(tmp_path / "model")


def test_a_pickle_is_an_archive_from_its_first_byte(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["llama"], tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    file = tmp_path / "model" / "pytorch_model.bin"
    torch.save(load_file(models["llama"] / "model.safetensors"), file)
    assert list(open_checkpoint(file.parent).files.archives()) == [(file.name, 0, file.stat().st_size)]
    assert list(open_checkpoint(models["llama"]).files.archives()) == []


def test_a_pickle_of_before_torch_1_6(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["llama"], tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(
        load_file(models["llama"] / "model.safetensors"), tmp_path / "model" / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )  # fmt: skip
    with pytest.raises(UnsupportedCheckpointError, match=r"torch before 1\.6"):
        open_checkpoint(tmp_path / "model")


def test_the_small_files_of_tokenizers(models: dict[str, Path], tmp_path: Path) -> None:
    """The tokenizer of another model contributes its files and tokens, but no sizes of that model."""
    tokenizer = tmp_path / "tokenizer"
    names = [
        "tiktoken.model", "tokenization_kimi.py", "tokenizer.model.v3", "additional_chat_templates/tools.jinja",
        "qwen.tiktoken",
    ]  # fmt: skip
    for name in names:
        (tokenizer / name).parent.mkdir(parents=True, exist_ok=True)
        (tokenizer / name).write_text(name)
    (tokenizer / "modeling_kimi.py").write_text("")
    tokens = {"bos_token_id": 7, "eos_token_id": [8, 9]}
    config = {**Qwen3Config(num_hidden_layers=9).to_dict(), **tokens, "layer_types": ["full_attention"] * 9}
    (tokenizer / "config.json").write_text(json.dumps(config))
    options = {"tokenizer": tokenizer, "vocab_size": VOCABULARY}
    for name in ("qwen3", "llama"):
        run = tmp_path / f"{name}-run"
        mcore_ckpt_ext.convert(models[name], run, mcore_ckpt_ext.TorchDist())
        report = mcore_ckpt_ext.convert(run, tmp_path / name, mcore_ckpt_ext.HuggingFace(**options))  # type: ignore[arg-type]
        for companion in names:
            assert (tmp_path / name / companion).read_text() == companion
        assert not (tmp_path / name / "modeling_kimi.py").exists()
        assert not any("bos_token_id" in note for note in report.notes)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert (found.config.bos_token_id, found.config.eos_token_id) == (7, [8, 9])
        assert found.generation_config.eos_token_id == [8, 9]
        assert len(getattr(found.config, "layer_types", ["", ""])) == 2
    mcore_ckpt_ext.convert(tmp_path / "llama", tmp_path / "llama-run", mcore_ckpt_ext.TorchDist(), force=True)
    mcore_ckpt_ext.convert(tmp_path / "llama-run", tmp_path / "llama", mcore_ckpt_ext.HuggingFace(), force=True)
    assert (tmp_path / "llama" / names[3]).exists()


def test_the_version_that_will_read_it_is_reported(models: dict[str, Path], tmp_path: Path) -> None:
    note = mcore_ckpt_ext.convert(models["llama"], tmp_path / "run", mcore_ckpt_ext.TorchDist()).notes[0]
    assert note.startswith("written for Megatron 0.")
    report = mcore_ckpt_ext.convert(
        models["llama"], tmp_path / "named", mcore_ckpt_ext.Legacy(megatron_version="0.16.1")
    )
    assert not any("written for" in note for note in report.notes)


def test_a_tensor_in_two_files(models: dict[str, Path], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(models["llama"]).save_pretrained(tmp_path / "model", max_shard_size="30KB")
    first, *_, last = sorted((tmp_path / "model").glob("*.safetensors"))
    name = next(iter(load_file(first)))
    save_file({**load_file(last), name: torch.zeros(2)}, last)
    with pytest.raises(
        UnreadableCheckpointError, match=f"contain a tensor of the same name; found: {name} in {first.name}"
    ):
        open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gpt_neox", "mamba2"])
def test_an_output_layer_that_the_config_declares_as_tied(
    name: str, is_same: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    """Some folders contain the tied weight twice; if the copies differ, the config or a tensor is wrong."""
    shutil.copytree(models[name], tmp_path / "model")
    config = {**CONFIGS[name]().to_dict(), "tie_word_embeddings": True}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config, default=str))
    family = family_of_config(config, "")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    output = tensors[family.embedding].clone()
    output[-1, -1] += not is_same
    save_file({**tensors, family.output_layer: output}, tmp_path / "model" / "model.safetensors")
    if is_same:
        report = mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
        assert f"{family.output_layer} is not read: the output layer is tied to the embedding" in report.notes
        assert not report.unread  # it was compared with the embedding
        return
    with pytest.raises(UnreadableCheckpointError, match="ties the output layer to the embedding, but the two differ"):
        mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "exaone_moe"])
def test_a_folder_of_a_model_without_a_head(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Names in folders of embedding models, such as Qwen3-Embedding, lack their first part."""
    shutil.copytree(models[name], tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    prefix = family_of_config(CONFIGS[name]().to_dict(), "").embedding.partition(".")[0] + "."
    shortened = {key.removeprefix(prefix): tensor for key, tensor in load_file(file).items()}
    save_file(shortened, file, {"format": "pt"})
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    expected, found = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "model", tmp_path / "back")
    )
    assert found.keys() == expected.keys()
    assert [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)] == []
