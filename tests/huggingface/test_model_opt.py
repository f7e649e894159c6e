"""Tests that weights quantized by NVIDIA's ModelOpt are read bitwise equal to those that ModelOpt decodes.

`tests/data/modelopt.safetensors` holds codes, scales and values of ModelOpt itself (see its README).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.planning.array_location import QuantizedMatrix, RawArray
from mcore_ckpt_ext.storage.scaled import decode, scale_reads
from tests.harness.huggingface import make, tensors, torch_dist

FP8 = torch.float8_e4m3fn
OF_MODEL_OPT = Path(__file__).parents[1] / "data" / "modelopt.safetensors"
# Magnitudes of the codes, as in ModelOpt's table `e2m1_values`, which has no negative zero.
_MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_NUMBERS = torch.cat([_MAGNITUDES, -_MAGNITUDES]) + 0.0


def in_nvfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return codes and both scales of a matrix, and under `values` what they decode to."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows, columns // 16, 16)
    common = blocks.abs().max() / (6 * 448)
    scales = (blocks.abs().amax(-1) / (6 * common)).clamp(min=2**-9).to(FP8)
    scaled = blocks / (scales.float() * common)[..., None]
    codes = (scaled.abs()[..., None] - _MAGNITUDES).abs().argmin(-1) + 8 * (scaled < 0)
    values = _NUMBERS[codes] * (scales.float() * common)[..., None]
    pairs = codes.view(rows, columns // 2, 2).to(torch.uint8)
    return {
        "weight": pairs[..., 0] | pairs[..., 1] << 4, "weight_scale": scales, "weight_scale_2": common,
        "values": values.view(rows, columns).bfloat16(),
    }  # fmt: skip


def in_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return codes and the scale of a matrix, and under `values` what they decode to."""
    scale = weight.float().abs().max() / 448
    codes = (weight.float() / scale).to(FP8)
    return {"weight": codes, "weight_scale": scale, "values": (codes.float() * scale).bfloat16()}


def quantize(folder: Path, algorithm: str, in_own_file: bool) -> dict[str, torch.Tensor]:
    """Quantize the projections of a model in place, and return each tensor as it is decoded."""
    stored: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    layers = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or not module.endswith("_proj"):
            stored[name] = expected[name] = tensor
            continue
        is_fp8 = algorithm == "FP8" or (algorithm == "MIXED_PRECISION" and ".experts." not in name)
        parts = (in_fp8 if is_fp8 else in_nvfp4)(tensor)
        expected[name] = parts.pop("values")
        parts["input_scale"] = torch.tensor(0.25)
        if module.endswith("k_proj"):
            parts["k_scale"] = torch.tensor(0.5)
        stored |= {f"{module}.{part}": value for part, value in parts.items()}
        layers[module] = {"quant_algo": "FP8" if is_fp8 else "NVFP4"}
    save_file(stored, folder / "model.safetensors")
    mixed = {"quantized_layers": layers} if algorithm == "MIXED_PRECISION" else {}
    declare(folder, {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", **mixed}, in_own_file)
    return expected


def declare(folder: Path, settings: dict[str, Any], in_own_file: bool) -> None:
    """Write ModelOpt's settings to its own file, or to `config.json`."""
    if in_own_file:
        own = {"producer": {"name": "modelopt"}, "quantization": settings}
        (folder / "hf_quant_config.json").write_text(json.dumps(own))
        return
    config = json.loads((folder / "config.json").read_text())
    section = {"quant_method": "modelopt", **settings}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
def test_values_are_those_of_model_opt(kind: str) -> None:
    """Every range of the matrix has the bits that ModelOpt itself computed."""
    stored = {name: tensor for name, tensor in load_file(OF_MODEL_OPT).items() if name.startswith(kind)}
    codes, scales, expected = (stored[f"{kind}.{part}"] for part in ("weight", "weight_scale", "values"))
    (rows, columns), packed = expected.shape, kind == "nvfp4"
    nowhere = RawArray("", 0, 0, "uint8", 0)
    block = (1, 16) if packed else (rows, columns)
    common = nowhere if packed else None
    extent = QuantizedMatrix(nowhere, nowhere, rows, columns, block, "bfloat16", packed, common_scale=common)

    def read_scales(at: int, count: int) -> torch.Tensor:
        return scales.view(-1)[at : at + count]

    read = scale_reads(read_scales, stored["nvfp4.weight_scale_2"]) if packed else read_scales
    for first, count in ((0, rows * columns), (1, 700), (130, 15), (67, 64), (5 * columns, 3 * columns)):
        found = decode(extent, first, count, lambda at, n: codes.view(-1)[at : at + n], read)
        bits = expected.view(-1)[first : first + count].view(torch.int16)
        assert torch.equal(found.view(torch.int16), bits)


@pytest.mark.parametrize("in_own_file", [True, False], ids=["own file", "config.json"])
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("llama", "NVFP4"), ("llama", "FP8"), ("qwen3_moe", "NVFP4"), ("nemotron_h", "MIXED_PRECISION")],
)
def test_a_model(name: str, algorithm: str, in_own_file: bool, tmp_path: Path) -> None:
    """It goes through Megatron's format, and back as the values of its codes; what is not read is named."""
    folder = tmp_path / "model"
    make(name, folder, torch.bfloat16)
    expected = quantize(folder, algorithm, in_own_file)
    mcore_ckpt_ext.convert(folder, tmp_path / "run", torch_dist(name), memory_limit=1)
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace(), memory_limit=1)
    found = tensors(tmp_path / "back")
    assert found.keys() == expected.keys()
    for label, tensor in expected.items():
        assert torch.equal(found[label].view(torch.int16), tensor.view(torch.int16)), label
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert not (tmp_path / "back" / "hf_quant_config.json").exists()
    reader = open_checkpoint(folder).format.reader
    assert isinstance(reader, HuggingFaceCheckpoint)
    assert {label.rpartition(".")[2] for label in reader.left_out} == {"input_scale", "k_scale"}
    scales = [item for item in reader.files.unread() if "only quantized inference uses" in item.why]
    assert len(scales) > 1
    assert verify(folder).sound


@pytest.mark.parametrize("in_own_file", [True, False], ids=["own file", "config.json"])
@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"quant_algo": "W4A16_AWQ"}, "W4A16_AWQ"),
        ({"quant_algo": "NVFP4_SVD"}, "NVFP4_SVD"),
        ({"quant_algo": None}, "None"),
        ({"quant_algo": "MIXED_PRECISION"}, "None"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
                "a": {"quant_algo": "NVFP4_AWQ"}, "b": {"quant_algo": "FP8"}}},
            "NVFP4_AWQ",
        ),
    ],
)  # fmt: skip
def test_other_algorithms_are_refused(settings: dict[str, Any], found: str, in_own_file: bool, tmp_path: Path) -> None:
    make("llama", tmp_path)
    declare(tmp_path, settings, in_own_file)
    with pytest.raises(UnsupportedCheckpointError, match=f"cannot be converted; found: {found}; expected: FP8"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("in_own_file", [True, False], ids=["own file", "config.json"])
def test_a_model_whose_cache_alone_is_quantized(in_own_file: bool, tmp_path: Path) -> None:
    """ModelOpt scales keys and values when the model serves; its weights are those that were trained."""
    make("llama", tmp_path / "model", torch.bfloat16)
    declare(tmp_path / "model", {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, in_own_file)
    before = load_file(tmp_path / "model" / "model.safetensors")
    scale = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5)}
    save_file({**before, **scale}, tmp_path / "model" / "model.safetensors")
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    found = tensors(tmp_path / "back")
    assert found.keys() == before.keys()
    assert all(torch.equal(found[label], tensor) for label, tensor in before.items())


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    make("llama", tmp_path, torch.bfloat16)
    quantize(tmp_path, "NVFP4", in_own_file=True)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for part, other in (
        (f"{name}_scale_2", None),
        (f"{name}_scale_2", torch.ones(2)),
        (f"{name}_scale", stored[f"{name}_scale"][:, :-1].contiguous()),
        (f"{name}_scale", stored[f"{name}_scale"].float()),
        (f"{name}_scale", None),
    ):
        changed = {label: tensor for label, tensor in stored.items() if label != part}
        save_file(changed if other is None else {**changed, part: other}, tmp_path / "model.safetensors")
        message = "have no scales" if (part, other) == (f"{name}_scale", None) else "NVFP4 weights do not match"
        with pytest.raises(UnreadableCheckpointError, match=message):
            open_checkpoint(tmp_path)
    of_fp8 = {name: torch.ones(48, 32).to(FP8), f"{name}_scale": torch.tensor(0.5)}
    save_file({**stored, **of_fp8}, tmp_path / "model.safetensors")
    with pytest.raises(UnreadableCheckpointError, match=r"NVFP4 weights do not match.*\(48, 32\) in float8_e4m3fn"):
        open_checkpoint(tmp_path)
