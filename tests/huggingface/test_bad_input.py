"""Tests invalid input: a clear error, exit code 2, nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import without_digests
from tests.harness.huggingface import MISTAKES

INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(models: dict[str, Path], tmp_path: Path) -> Path:
    """Return a private copy of a Llama in several files, to be damaged."""
    AutoModelForCausalLM.from_pretrained(models["llama"]).save_pretrained(tmp_path / "model", max_shard_size="30KB")
    return tmp_path / "model"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def missing_shard(model: Path) -> None:
    next(iter(sorted(model.glob("model-*.safetensors")))).unlink()


def index_of_absent_tensors(model: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        index["weight_map"]["model.layers.2.mlp.up_proj.weight"] = next(iter(index["weight_map"].values()))

    edit(model / INDEX, change)


def index_that_lacks_a_tensor(model: Path) -> None:
    edit(model / INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))


def index_that_leads_out_of_the_folder(model: Path) -> None:
    edit(model / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": "../model.safetensors"}))


def cut_file(model: Path) -> None:
    file = max(model.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])


def header_that_lies(model: Path) -> None:
    file = max(model.glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes((2**40).to_bytes(8, "little") + data[8:])


def other_hidden_size(model: Path) -> None:
    edit(model / "config.json", lambda config: config.update(hidden_size=48, head_dim=8))


def other_heads(model: Path) -> None:
    edit(model / "config.json", lambda config: config.update(num_key_value_heads=4))


def more_layers(model: Path) -> None:
    edit(model / "config.json", lambda config: config.update(num_hidden_layers=3))


def other_vocabulary(model: Path) -> None:
    edit(model / "config.json", lambda config: config.update(vocab_size=300))


def sizes_that_are_no_numbers(model: Path) -> None:
    edit(model / "config.json", lambda config: config.update(num_hidden_layers="two"))


def layers_without_end(model: Path) -> None:
    edit(model / "config.json", lambda config: config.update(num_hidden_layers=60_000))


def positions_of_nothing(model: Path) -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 0}
    edit(model / "config.json", lambda config: config.update(rope_parameters=scaling))


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def adapter(model: Path) -> None:
    for path in model.iterdir():
        path.unlink()
    (model / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"base_model.model.lora_A.weight": torch.ones(2)}, model / "adapter_model.safetensors")


def quantized(model: Path) -> None:
    edit(model / "config.json", lambda config: config.update(quantization_config={"quant_method": "gptq", "bits": 4}))


def quantized_and_silent_about_it(model: Path) -> None:
    file = max(model.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[f"{name}_scale_inv"] = torch.ones(1)
    save_file(tensors, file)
    edit(model / INDEX, lambda index: index["weight_map"].update({f"{name}_scale_inv": file.name}))


def biases(model: Path) -> None:
    edit(model / "config.json", lambda config: config.update(attention_bias=True))


def unknown_family(model: Path) -> None:
    edit(model / "config.json", lambda config: config.update(model_type="parrot"))


def unknown_positions(model: Path) -> None:
    scaling = {"rope_type": "proportional", "rope_theta": 10000.0, "factor": 2.0}
    edit(model / "config.json", lambda config: config.update(rope_parameters=scaling))


def changed(**keys: Any) -> Callable[[Path], None]:
    return lambda model: edit(model / "config.json", lambda config: config.update(**keys))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing_shard, "files that do not exist"),
        (index_of_absent_tensors, "no model.layers.2.mlp.up_proj.weight"),
        (index_that_lacks_a_tensor, "a model.norm.weight"),
        (index_that_leads_out_of_the_folder, "do not trust it: an index lists files of its own folder"),
        (cut_file, "damaged"),
        (header_that_lies, "longer than the file"),
        (other_hidden_size, "not (250, 48)"),
        (other_heads, "k_proj.weight is (16, 32), not (32, 32)"),
        (more_layers, "no model.layers.2."),
        (other_vocabulary, "embed_tokens.weight is (250, 32), not (300, 32)"),
        (sizes_that_are_no_numbers, "an invalid size; found: 'two'"),
        (layers_without_end, "more layers than the folder can contain"),
        (no_config, "config.json"),
        (adapter, "an adapter (LoRA), not a model"),
        (quantized, "gptq"),
        (quantized_and_silent_about_it, "_scale_inv"),
        (biases, "attention_bias"),
        (unknown_family, "model_type parrot"),
        (changed(model_type="olmo2"), "found: model_type olmo2: it norms what comes out of a block"),
        (changed(model_type="ernie4_5_moe"), "Megatron Core has no such model, up to 0.19.2"),
        (changed(rope_parameters=[1]), "rope_parameters; found: [1]; expected: keys with values, or null"),
        (changed(rms_norm_eps=-1e-6), "layernorm_epsilon: -1e-06; expected: a finite number, 0 or more"),
        (changed(rope_parameters={"rope_type": "linear", "factor": -2.0}), "-2; expected: a finite number above 0"),
        (changed(rope_parameters={"rope_type": "default", "rope_theta": -1.0}), "rotary_base: -1"),
        (changed(quantization_config={"quant_method": "fp8", "weight_block_size": [0, 16]}),
         "weight_block_size [0, 16]; expected: two whole numbers above 0"),
        (positions_of_nothing, "one has an invalid value"),
        (unknown_positions, "rope_scaling"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_it_is_refused(
    damage: Callable[[Path], None], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(model)
    assert main(["convert", str(model), str(tmp_path / "run"), "--to", "torch_dist"]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_untrusted_pickles_run_no_code(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    for path in model.glob("model*"):
        path.unlink()
    torch.save({"model.norm.weight": Evil()}, model / "pytorch_model.bin")
    assert main(["convert", str(model), str(tmp_path / "run"), "--to", "torch_dist"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_job_of_no_known_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """p21 has norms of queries and keys, and biases: neither Qwen2 nor Qwen3. All reasons are reported."""
    run = fixture_named("p21").run
    assert main(["convert", str(run), str(tmp_path / "hf"), "--to", "hf"]) == 2
    shown = capsys.readouterr().err
    assert "matches no known model family" in shown
    assert "--family" in shown
    assert main(["convert", str(run), str(tmp_path / "hf"), "--to", "hf", "--family", "qwen3"]) == 2
    assert "add_qkv_bias is True, not False" in capsys.readouterr().err
    assert main(["convert", str(run), str(tmp_path / "hf"), "--to", "hf", "--family", "parrot"]) == 2
    assert "unknown model family" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_no_rule_takes(models: dict[str, Path], tmp_path: Path) -> None:
    """An additional array in a Megatron checkpoint is reported, and not dropped."""
    mcore_ckpt_ext.convert(models["llama"], tmp_path / "run", mcore_ckpt_ext.Canonical())
    index_file = tmp_path / "run" / INDEX
    (file,) = (tmp_path / "run").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["checksums"]
    tensors["weight.decoder.layers.1.self_attention.linear_qkv.bias"] = torch.ones(64)
    save_file(tensors, file)
    edit(index_file, lambda index: index["weight_map"].update(dict.fromkeys(tensors, file.name)))
    about = without_digests(tmp_path / "run") / "common.json"
    name = "decoder.layers.1.self_attention.linear_qkv.bias"
    edit(about, lambda content: content["sharded_keys"].update({name: [name, []]}))
    with pytest.raises(UnsupportedCheckpointError, match=f"Llama does not match: a {name}"):
        mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "hf", mcore_ckpt_ext.HuggingFace())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the file does not exist"),
        ("1 / 0", "ZeroDivisionError"),
        ("class Name:\n    pass\n", "no family of that name"),
    ],
)
def test_a_family_file_that_is_none(
    content: str | None, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "family.py"
    if content is not None:
        file.write_text(content)
    words = ["convert", str(model), str(tmp_path / "run"), "--to", "torch_dist", "--family", f"{file}:Name"]
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_two_families_that_fit(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mcore_ckpt_ext.families import recognition
    from mcore_ckpt_ext.families.llama import Llama

    class Twin(Llama):
        model_type = "twin"

    mcore_ckpt_ext.convert(models["llama"], tmp_path / "run", mcore_ckpt_ext.TorchDist())
    (tmp_path / "run" / "release" / "tokenizer" / "config.json").unlink()  # it would name the original family
    monkeypatch.setattr(recognition, "FAMILIES", (*recognition.FAMILIES, Twin()))
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 2
    shown = capsys.readouterr().err
    assert "fits several model families; found: Llama, Twin" in shown
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf", "--family", "Twin"]) == 0


def test_tensors_without_an_equivalent_in_megatron_are_listed(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(models["gpt2"], tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, file)  # as the released files are
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "run"), "--to", "torch_dist"]) == 0
    assert "left out: transformer.h.0.attn.bias, 64 B: no equivalent in Megatron" in capsys.readouterr().out


def test_the_reports_of_verify_and_inspect(models: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(models["llama"])]) == 0
    assert "no checksums stored" in capsys.readouterr().out
    assert main(["inspect", str(models["llama"])]) == 0
    assert "a Hugging Face folder" in capsys.readouterr().out


def test_mistral_without_a_window(models: dict[str, Path], tmp_path: Path) -> None:
    """Mistral since 0.2 equals Llama except for its name, which the original folder or the user determines."""
    shutil.copytree(models["llama"], tmp_path / "model")
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    edit(tmp_path / "model" / "config.json", lambda content: content.update(config))
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    (tmp_path / "run" / "release" / "tokenizer" / "config.json").unlink()
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "unsaid", mcore_ckpt_ext.HuggingFace())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "said", mcore_ckpt_ext.HuggingFace(), family="mistral")
    found = {
        name: json.loads((tmp_path / name / "config.json").read_text())["model_type"]
        for name in ("back", "unsaid", "said")
    }
    assert found == {"back": "mistral", "unsaid": "llama", "said": "mistral"}


@pytest.mark.parametrize(
    ("mistake", "there", "back"),
    [
        ("KeysTwice", "omit or repeat rows of a parameter", "omit or repeat rows of a parameter"),
        ("WithoutOutput", "an lm_head.weight", "an output_layer.weight"),
    ],
)
def test_a_family_that_would_drop_something(
    mistake: str, there: str, back: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = ["--family", f"{MISTAKES}:{mistake}"]
    assert main(["convert", str(models["llama"]), str(tmp_path / "no"), "--to", "torch_dist", *family]) == 2
    assert there in capsys.readouterr().err
    mcore_ckpt_ext.convert(models["llama"], tmp_path / "run", mcore_ckpt_ext.TorchDist())
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "no"), "--to", "hf", *family]) == 2
    assert back in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
