"""Tests `--quantize fp8-block`: the form of DeepSeek's folders, and the values that other readers decode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError
from tests.harness.huggingface import dequantized_blocks, make, tensors

FP8 = torch.float8_e4m3fn
QUANTIZED = mcore_ckpt_ext.HuggingFace(quantize="fp8-block")
# A matrix of two whole blocks, and matrices with incomplete blocks in rows and in columns.
WIDTHS = {"whole": (256, 384), "edges": (160, 200)}


@pytest.fixture(scope="module", params=WIDTHS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bf16 Llama as a Megatron checkpoint; the sibling folder `model` is its source."""
    folder = tmp_path_factory.mktemp(request.param)
    hidden, inner = WIDTHS[request.param]
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=250, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    with torch.no_grad():
        for label, tensor in model.named_parameters():
            # Blocks with values of very different magnitude, and one of zeros.
            sizes = torch.logspace(-4, 2, tensor.shape[0])
            tensor.copy_(torch.randn_like(tensor) * sizes.view(-1, *(1 for _ in tensor.shape[1:])))
            if label.endswith("layers.0.mlp.up_proj.weight"):
                tensor[:128, :128] = 0
    model.save_pretrained(folder / "model")
    mcore_ckpt_ext.convert(folder / "model", folder / "run", mcore_ckpt_ext.TorchDist())
    return folder / "run"


def spread(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


def test_codes_and_scales(run: Path, tmp_path: Path) -> None:
    """Each number is decoded within half a step of its code, and the largest of each block has the largest code."""
    mcore_ckpt_ext.convert(run, tmp_path / "fp8", QUANTIZED)
    before, found = tensors(run.parent / "model"), tensors(tmp_path / "fp8")
    linear = {name for name in before if "_proj" in name}
    assert found.keys() == before.keys() | {f"{name}_scale_inv" for name in linear}
    for name, weight in before.items():
        if name not in linear:
            assert torch.equal(found[name], weight), name
            continue
        codes, scales = found[name], found[f"{name}_scale_inv"]
        assert (codes.dtype, scales.dtype) == (FP8, torch.float32)
        assert scales.shape == tuple(-(-size // 128) for size in weight.shape)
        numbers = codes.float()
        # With three mantissa bits, half a step is 2^-4 of the next lower power of two, and 2^-10 near zero.
        half = torch.maximum(2.0 ** (numbers.abs().clamp(min=2.0**-6).log2().floor() - 4), torch.tensor(2.0**-10))
        of_all = spread(scales, weight.shape)
        error = (numbers.double() * of_all.double() - weight.double()).abs()
        assert (error <= half.double() * of_all.double() * (1 + 1e-5)).all(), name
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                part = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
                largest = weight[part].float().abs().max()
                assert scales[row, column] == (largest / 448 if largest else 1.0)
                assert numbers[part].abs().max() == (448 if largest else 0)


def test_it_is_read_back_as_transformers_reads_it(run: Path, tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(run, tmp_path / "fp8", QUANTIZED)
    mcore_ckpt_ext.convert(tmp_path / "fp8", tmp_path / "again", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "again", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    written, found = tensors(tmp_path / "fp8"), tensors(tmp_path / "back")
    for name, codes in written.items():
        if codes.dtype == FP8:
            scales = written[f"{name}_scale_inv"]
            expected = (codes.float() * spread(scales, codes.shape)).bfloat16()
            if codes.shape[0] % 128 == codes.shape[1] % 128 == 0:  # it refuses other shapes
                assert torch.equal(expected, dequantized_blocks(codes, scales))
            assert torch.equal(found[name], expected), name


def test_the_configuration_says_so(run: Path, tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(run, tmp_path / "fp8", QUANTIZED)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config.get("torch_dtype", config.get("dtype")) == "bfloat16"  # the key depends on the published file
    assert config["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
    }  # fmt: skip
    assert list(FineGrainedFP8Config.from_dict(config["quantization_config"]).weight_block_size) == [128, 128]


def test_the_limit_of_memory_changes_no_byte(run: Path, tmp_path: Path) -> None:
    for name, limit in (("large", 1 << 30), ("small", 1)):
        mcore_ckpt_ext.convert(run, tmp_path / name, QUANTIZED, memory_limit=limit)
    large, small = tensors(tmp_path / "large"), tensors(tmp_path / "small")
    for name, tensor in large.items():
        assert torch.equal(tensor.view(torch.uint8), small[name].view(torch.uint8)), name


def test_models_that_cannot_be_quantized_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("gpt_oss", tmp_path / "model")
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    words = ["convert", str(tmp_path / "run"), str(tmp_path / "fp8"), "--to", "hf", "--quantize", "fp8-block"]
    assert main(words) == 2
    assert "--quantize does not support the transposed weights" in capsys.readouterr().err
    with pytest.raises(UsageError, match="safetensors only"):
        mcore_ckpt_ext.HuggingFace(quantize="fp8-block", pickled=True)
    model = make("llama", tmp_path / "llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 3] = float("nan")
    model.save_pretrained(tmp_path / "llama")
    mcore_ckpt_ext.convert(tmp_path / "llama", tmp_path / "holed", mcore_ckpt_ext.TorchDist())
    with pytest.raises(UnsupportedCheckpointError, match=r"not a finite number.*layers\.0\.mlp\.up_proj"):
        mcore_ckpt_ext.convert(tmp_path / "holed", tmp_path / "no", QUANTIZED)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_experts_and_latent_attention(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Routers, norms and biases are not quantized."""
    mcore_ckpt_ext.convert(models[name], tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "fp8", QUANTIZED)
    kinds = {label: tensor.dtype for label, tensor in tensors(tmp_path / "fp8").items()}
    assert kinds["model.layers.1.mlp.experts.0.down_proj.weight"] == FP8
    assert kinds["model.layers.1.mlp.gate.weight"] == kinds["lm_head.weight"] == torch.float32
    assert all((dtype == FP8) == (label.endswith("_proj.weight") or "_proj_with_mqa" in label)
               for label, dtype in kinds.items() if not label.endswith("_scale_inv"))  # fmt: skip
