"""Tests options for the folder: dtype, masters, pickles, sizes of files, vocabulary, tokenizer."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import ProofError, UnsupportedCheckpointError, UsageError
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.targets import TARGETS
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import without_digests
from tests.harness.huggingface import MISTAKES, VOCABULARY, assert_same_tensors, make, tensors


@dataclass(frozen=True)
class Outcome:
    returncode: int
    stdout: str
    stderr: str


def command(*words: object) -> Outcome:
    """Return a function that runs the command line in this process."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = main([str(word) for word in words])
    return Outcome(code, output.getvalue(), errors.getvalue())


@pytest.fixture(scope="module")
def run(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama as a Megatron checkpoint."""
    folder = tmp_path_factory.mktemp("llama") / "run"
    mcore_ckpt_ext.convert(models["llama"], folder, mcore_ckpt_ext.TorchDist())
    return folder


def test_another_dtype(run: Path, models: dict[str, Path], tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(run, tmp_path / "hf", mcore_ckpt_ext.HuggingFace(dtype="bfloat16"))
    for name, tensor in tensors(models["llama"]).items():
        assert torch.equal(tensors(tmp_path / "hf")[name], tensor.bfloat16()), name
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_bias_of_experts_keeps_its_precision(models: dict[str, Path], tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(models["deepseek_v3"], tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "hf", mcore_ckpt_ext.HuggingFace(dtype="float16"))
    dtypes = {name.rpartition(".")[2]: tensor.dtype for name, tensor in tensors(tmp_path / "hf").items()}
    assert dtypes == {"weight": torch.float16, "e_score_correction_bias": torch.float32}


def test_weights_of_bf16_stay_so(tmp_path: Path) -> None:
    make("qwen3", tmp_path / "model", torch.bfloat16)
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    checkpoint = mcore_ckpt_ext.open_checkpoint(tmp_path / "run")
    assert checkpoint.job.args["bf16"]
    assert str(checkpoint.job.args["params_dtype"]) == "torch.bfloat16"
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert_same_tensors(tmp_path / "model", tmp_path / "back")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_pickled_and_in_several_files(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(models[name], tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(
        tmp_path / "run", tmp_path / "hf", mcore_ckpt_ext.HuggingFace(pickled=True, max_shard_size=30_000)
    )
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.bin"))
    assert files == [f"pytorch_model-{n:05d}-of-{len(files):05d}.bin" for n in range(1, len(files) + 1)]
    assert len(files) > 2
    found = {}
    for file in files:
        found |= torch.load(tmp_path / "hf" / file, weights_only=True)
    expected = tensors(models[name])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[label], tensor) for label, tensor in expected.items())
    index = json.loads((tmp_path / "hf" / "pytorch_model.bin.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    mcore_ckpt_ext.convert(tmp_path / "hf", tmp_path / "again", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "again", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert_same_tensors(models[name], tmp_path / "back")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_files_are_cut_as_save_pretrained_cuts_them(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(models[name]).save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    mcore_ckpt_ext.convert(models[name], tmp_path / "run", mcore_ckpt_ext.TorchDist())
    words = ["--to", "hf", "--max-shard-size", "30KB"]
    result = command("convert", tmp_path / "run", tmp_path / "ours", *words)
    assert result.returncode == 0, result.stderr
    theirs, ours = (
        json.loads((tmp_path / side / "model.safetensors.index.json").read_text()) for side in ("theirs", "ours")
    )
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    for file in set(ours["weight_map"].values()):
        sizes = [tensor.nbytes for tensor in load_file(tmp_path / "ours" / file).values()]
        assert sum(sizes) <= 30_000 or len(sizes) == 1
    assert_same_tensors(tmp_path / "theirs", tmp_path / "ours")


def test_a_job_of_megatron_with_optimizer_weights_and_masters(tmp_path: Path) -> None:
    """p02 is Llama-like, bf16, TP2 x PP2 x DP2, `dp_reshardable`; NullTokenizer has 127 + 1 tokens."""
    fixture = fixture_named("p02")
    report = mcore_ckpt_ext.convert(fixture.run, tmp_path / "weights", mcore_ckpt_ext.HuggingFace())
    mcore_ckpt_ext.convert(fixture.run, tmp_path / "masters", mcore_ckpt_ext.HuggingFace(kind="fp32_param"))
    mcore_ckpt_ext.convert(
        fixture.run, tmp_path / "rounded", mcore_ckpt_ext.HuggingFace(kind="fp32_param", dtype="bfloat16")
    )
    weights, masters = tensors(tmp_path / "weights"), tensors(tmp_path / "masters")
    assert report.proven_elements == 0
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert torch.equal(masters["model.norm.weight"], fixture.truth["fp32_param.decoder.final_layernorm.weight"])
    assert masters["model.embed_tokens.weight"].shape[0] == 128
    embedding = fixture.truth["fp32_param.embedding.word_embeddings.weight"]
    assert embedding.shape[0] > 128
    assert torch.equal(masters["model.embed_tokens.weight"], embedding[:128])
    assert any(not torch.equal(masters[name], tensor.float()) for name, tensor in weights.items())
    assert_same_tensors(tmp_path / "weights", tmp_path / "rounded")
    assert compare(fixture.run, tmp_path / "weights").equal
    AutoModelForCausalLM.from_pretrained(tmp_path / "masters")


def test_masters_are_verified_during_conversion(tmp_path: Path) -> None:
    fixture = fixture_named("p02")
    report = mcore_ckpt_ext.convert(
        fixture.run, tmp_path / "masters", mcore_ckpt_ext.HuggingFace(kind="fp32_param", dtype="float16")
    )
    assert report.proven_elements == sum(tensor.numel() for tensor in tensors(tmp_path / "masters").values())
    with pytest.raises(UnsupportedCheckpointError, match="no fp32 masters"):
        mcore_ckpt_ext.convert(tmp_path / "masters", tmp_path / "again", mcore_ckpt_ext.HuggingFace(kind="fp32_param"))


def test_the_tokenizer_comes_along(models: dict[str, Path], run: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    words = {f"word{number}": number for number in range(VOCABULARY - 1)}
    added = [{"id": VOCABULARY - 1, "content": "<end>"}]
    files = {"tokenizer.json": {"model": {"vocab": words}, "added_tokens": added}, "tokenizer_config.json": {}}
    for name, content in files.items():
        (tokenizer / name).write_text(json.dumps(content))
    mcore_ckpt_ext.convert(run, tmp_path / "hf", mcore_ckpt_ext.HuggingFace(tokenizer=tokenizer))
    for name in files:
        assert (tmp_path / "hf" / name).read_bytes() == (tokenizer / name).read_bytes()
    # Tokenizer files are also kept in a round trip to Megatron.
    mcore_ckpt_ext.convert(tmp_path / "hf", tmp_path / "again", mcore_ckpt_ext.TorchDist())
    assert (tmp_path / "again" / "release" / "tokenizer" / "tokenizer.json").exists()
    mcore_ckpt_ext.convert(tmp_path / "again", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    # A checkpoint without a vocabulary size gets it from the tokenizer.
    mcore_ckpt_ext.convert(
        forgetful(run, tmp_path / "run"), tmp_path / "out", mcore_ckpt_ext.HuggingFace(tokenizer=tokenizer)
    )
    assert_same_tensors(models["llama"], tmp_path / "out")


def forgetful(run: Path, folder: Path) -> Path:
    """Write a canonical copy whose arguments and files lack the vocabulary size."""
    mcore_ckpt_ext.convert(run, folder, mcore_ckpt_ext.Canonical())
    about = json.loads((folder / "common.json").read_text())
    text = json.dumps(about)
    assert text.count('"vocab_size"') == 1
    (without_digests(folder) / "common.json").write_text(text.replace('"vocab_size"', '"vocabulary_once"'))
    return folder


def test_an_unknown_vocabulary_is_asked_for(run: Path, models: dict[str, Path], tmp_path: Path) -> None:
    unsaid = forgetful(run, tmp_path / "run")
    result = command("convert", unsaid, tmp_path / "hf", "--to", "hf")
    assert result.returncode == 2
    assert "--vocab-size N" in result.stderr
    assert "--tokenizer PATH" in result.stderr
    assert not (tmp_path / "hf").exists()
    result = command("convert", unsaid, tmp_path / "hf", "--to", "hf", "--vocab-size", VOCABULARY)
    assert result.returncode == 0, result.stderr
    assert_same_tensors(models["llama"], tmp_path / "hf")


def test_a_dry_run_says_everything_and_writes_nothing(run: Path, tmp_path: Path) -> None:
    result = command("convert", run, tmp_path / "hf", "--to", "hf", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "note: model family: Llama" in result.stdout
    assert not list(tmp_path.iterdir())


def test_the_flags_of_the_job_are_reported(models: dict[str, Path], tmp_path: Path) -> None:
    result = command("convert", models["qwen3"], tmp_path / "run", "--to", "torch_dist")
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("note: train it with:"))
    assert "--norm-epsilon 1e-06" in line
    assert "--qk-layernorm" in line
    assert "--kv-channels 16" in line


def test_diff_of_both_kinds_and_of_one_bit(run: Path, models: dict[str, Path], tmp_path: Path) -> None:
    result = command("diff", run, models["llama"])
    assert result.returncode == 0, result.stdout
    assert "equal in every bit" in result.stdout
    mcore_ckpt_ext.convert(run, tmp_path / "hf", mcore_ckpt_ext.HuggingFace())
    assert command("diff", tmp_path / "hf", models["llama"]).returncode == 0
    file = tmp_path / "hf" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    result = command("diff", run, tmp_path / "hf")
    assert result.returncode == 1
    assert "1 of " in result.stdout


def test_megatron_bridge_finds_its_run_config(models: dict[str, Path], tmp_path: Path) -> None:
    """The YAML has valid numbers, and the providers of megatron-bridge 0.3.1 by their paths."""
    providers = {
        "llama3_tied": "gpt_provider.GPTModelProvider",
        "deepseek_v3": "mla_provider.MLAModelProvider",
        "gemma2": "gemma.gemma2_provider.Gemma2ModelProvider",
    }
    for name, provider in providers.items():
        mcore_ckpt_ext.convert(models[name], tmp_path / name, mcore_ckpt_ext.TorchDist())
        content = yaml.safe_load((tmp_path / name / "release" / "run_config.yaml").read_text())
        model, args = content["model"], mcore_ckpt_ext.open_checkpoint(tmp_path / name).job.args
        assert model["_target_"] == f"megatron.bridge.models.{provider}"
        assert content["checkpoint"] == {"save_rng": False, "save_optim": False, "fully_parallel_save": True}
        assert (model["layernorm_epsilon"], model["num_layers"]) == (1e-6, args["num_layers"])
        assert model.get("multi_latent_attention", False) == (name == "deepseek_v3")
        assert model["params_dtype"] == {"_target_": "torch.float32", "_call_": False}


def test_norms_that_are_as_wide_as_all_heads(models: dict[str, Path], tmp_path: Path) -> None:
    """Megatron-Bridge gets its layer spec; a model that differs from Qwen3-MoE only in this width is not one."""
    with pytest.raises(UnsupportedCheckpointError, match="the tensor-parallel split of the norms"):
        mcore_ckpt_ext.convert(models["olmoe"], tmp_path / "no", mcore_ckpt_ext.Legacy(tensor_model_parallel_size=2))
    report = mcore_ckpt_ext.convert(models["olmoe"], tmp_path / "run", mcore_ckpt_ext.TorchDist())
    assert not any("train it with" in note for note in report.notes)
    model = yaml.safe_load((tmp_path / "run" / "release" / "run_config.yaml").read_text())["model"]
    assert model["transformer_layer_spec"]["_target_"].endswith("olmoe_provider.olmoe_layer_spec")
    (tmp_path / "run" / "release" / "tokenizer" / "config.json").unlink()
    with pytest.raises(UnsupportedCheckpointError, match="q_layernorm.weight is"):
        mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "hf", mcore_ckpt_ext.HuggingFace())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "hf", mcore_ckpt_ext.HuggingFace(), family="olmoe")
    assert_same_tensors(models["olmoe"], tmp_path / "hf")


def test_damage_to_the_optimizer_does_not_keep_the_weights(tmp_path: Path) -> None:
    """The optimizer of p11 lacks elements."""
    mcore_ckpt_ext.convert(fixture_named("p11").run, tmp_path / "hf", mcore_ckpt_ext.HuggingFace())
    with pytest.raises(ProofError, match="elements of the optimizer are missing"):
        mcore_ckpt_ext.convert(
            fixture_named("p11").run, tmp_path / "masters", mcore_ckpt_ext.HuggingFace(kind="fp32_param")
        )


@pytest.mark.parametrize("family", [None, f"{MISTAKES}:InterleavedHalves"])
def test_an_interrupted_conversion_continues(family: str | None, run: Path, tmp_path: Path) -> None:
    """The second process continues the first one, because its options have the same text."""
    counted: list[int] = []

    def interrupt(done: int, total: int) -> None:
        counted.append(done)
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mcore_ckpt_ext.convert(
            run, tmp_path / "hf", mcore_ckpt_ext.HuggingFace(), family=family, workers=1, progress=interrupt
        )
    assert not (tmp_path / "hf").exists()
    again: list[int] = []

    def count(done: int, total: int) -> None:
        again.append(done)

    mcore_ckpt_ext.convert(
        run, tmp_path / "hf", mcore_ckpt_ext.HuggingFace(), family=family, workers=1, resume=True, progress=count
    )
    assert 0 < len(again) < len(tensors(tmp_path / "hf"))
    mcore_ckpt_ext.convert(run, tmp_path / "at_once", mcore_ckpt_ext.HuggingFace(), family=family)
    assert_same_tensors(tmp_path / "at_once", tmp_path / "hf")
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_the_family_of_the_documentation_converts_both_ways(models: dict[str, Path], tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "own-format.md").read_text()
    (tmp_path / "parrot.py").write_text(page.split("```python\n")[1].split("```")[0])
    config = json.loads((models["qwen2"] / "config.json").read_text())
    for key in ("rms_norm_eps", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"):
        config.pop(key, None)
    config |= {"model_type": "parrot", "architectures": ["ParrotForCausalLM"], "parrot_eps": 3e-4}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    perches = {f"model.layers.{layer}.perch.weight": torch.randn(8) for layer in range(2)}
    save_file({**tensors(models["qwen2"]), **perches}, tmp_path / "model" / "model.safetensors")
    words = ["--family", f"{tmp_path / 'parrot.py'}:Parrot"]
    there = command("convert", tmp_path / "model", tmp_path / "run", "--to", "torch_dist", *words)
    assert there.returncode == 0, there.stderr
    assert mcore_ckpt_ext.open_checkpoint(tmp_path / "run").job.args["layernorm_epsilon"] == 3e-4
    back = command("convert", tmp_path / "run", tmp_path / "back", "--to", "hf", *words)
    assert back.returncode == 0, back.stderr
    assert_same_tensors(tmp_path / "model", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["parrot_eps"] == 3e-4
    same = command("diff", tmp_path / "run", tmp_path / "model", *words)
    assert same.returncode == 0, same.stdout + same.stderr


def test_matrices_that_lie_the_other_way_round_in_small_blocks(tmp_path: Path) -> None:
    """GPT-2's matrices are read and written in blocks that begin and end within rows and columns."""
    config = GPT2Config(vocab_size=50, n_embd=168, n_layer=1, n_head=6, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    for source, target, form in (("model", "run", "torch_dist"), ("run", "back", "hf"), ("back", "more", "legacy")):
        report = mcore_ckpt_ext.convert(tmp_path / source, tmp_path / target, TARGETS[form](), memory_limit=1)
        assert report.peak_memory == 16 * (1 << 16)
    assert max(tensor.nbytes for tensor in tensors(tmp_path / "model").values()) > 5 * (1 << 16)
    assert_same_tensors(tmp_path / "model", tmp_path / "back")
    assert compare(tmp_path / "model", tmp_path / "more").equal


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["rotary_bas=1"], "Megatron has no such argument; found: rotary_bas"),
        (["a=1", "a=2"], "an argument is given twice"),
    ],
)
def test_an_argument_that_is_misspelt_or_given_twice_is_refused(given: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "out", mcore_ckpt_ext.HuggingFace(arguments=given))


@pytest.mark.parametrize(
    ("key", "value", "argument"), [("rms_norm_eps", 1e-3, "layernorm_epsilon"), ("rope_theta", 5e5, "rotary_base")]
)
def test_a_different_model_setting_is_reported(
    key: str, value: float, argument: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """All tensors are equal, but the computation differs."""
    shutil.copytree(models["llama"], tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    config = json.loads(file.read_text())
    config.pop("rope_parameters" if key == "rope_theta" else "", None)
    file.write_text(json.dumps({**config, key: value}))
    found = compare(models["llama"], tmp_path / "other")
    assert found.equal
    assert argument in [fact.what for fact in found.facts]
    assert not [fact for fact in compare(models["llama"], models["llama"]).facts if fact.what == argument]
