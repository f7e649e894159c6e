"""Tests that quantized weights are read bitwise equal to those of transformers on a CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.planning.array_location import QuantizedMatrix, RawArray
from mcore_ckpt_ext.storage import scaled
from mcore_ckpt_ext.storage.scaled import decode
from tests.harness.huggingface import (
    dequantized_blocks,
    dequantized_experts,
    make,
    save_whole,
    tensors,
    torch_dist,
)

FP8 = torch.float8_e4m3fn
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {
        "group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}},
        "of_attention": {"weights": None},
    },
    "transform_config": {}, "sparsity_config": {"format": "dense"},
}  # fmt: skip


def by_blocks(weight: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of a matrix of whole blocks."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // height, height, columns // width, width)
    scales = blocks.abs().amax((1, 3)) / 448
    return (blocks / scales[:, None, :, None]).to(FP8).view(rows, columns), scales


def quantize(folder: Path, how: str) -> dict[str, torch.Tensor]:
    """Quantize the projections of a model in place, and return each tensor as transformers decodes it."""
    file = folder / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        if "_proj" not in name:
            stored[name] = expected[name] = tensor
            continue
        rows, columns = tensor.shape
        height, width = {"channel": (1, columns), "rows": (1, columns), "blocks": (8, 8), "block": (8, 8)}.get(
            how, (rows, columns)
        )
        codes, scales = by_blocks(tensor, height, width)
        if how in ("blocks", "block"):
            stored[f"{name}_scale" + ("_inv" if how == "blocks" else "")] = scales
            expected[name] = dequantized_blocks(codes, scales)
        elif how == "rows":
            stored[f"{name}_scale"] = scales
            expected[name] = (codes.float() * scales).bfloat16()
        else:
            scales = (scales if how == "channel" else scales.view(1)).bfloat16()
            stored |= {f"{name}_scale": scales, name.replace(".weight", ".input_scale"): torch.ones(1)}
            expected[name] = codes.to(torch.bfloat16) * scales  # `_dequantize` of compressed_tensors
        stored[name] = codes
    save_file(stored, file)
    config = json.loads((folder / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}
    compressed = json.loads(json.dumps(COMPRESSED).replace("channel", how))
    if how == "block":
        compressed["config_groups"]["group_0"]["weights"]["block_structure"] = [8, 8]
    fbgemm = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    auto = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    config["quantization_config"] = {"blocks": fp8, "rows": fbgemm, "AutoFP8": auto}.get(how, compressed)
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("how", ["blocks", "block", "channel", "rows", "tensor", "AutoFP8"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_fp8(name: str, how: str, tmp_path: Path) -> None:
    make(name, tmp_path / "model", torch.bfloat16)
    if name == "deepseek_v3" and how in ("blocks", "block"):
        pad_to_blocks(tmp_path / "model")
    expected = quantize(tmp_path / "model", how)
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", torch_dist(name), memory_limit=1)
    report = mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    found = tensors(tmp_path / "back")
    assert found.keys() == expected.keys()
    for label, tensor in expected.items():
        assert torch.equal(found[label], tensor), label
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert report.bytes_written
    compared = mcore_ckpt_ext.compare(tmp_path / "model", tmp_path / "back")
    (decoded,) = (fact for fact in compared.facts if fact.what == "decoded before")
    assert (compared.equal, "weights with codes and scales" in decoded.a, decoded.b) == (True, True, "nothing")
    view = open_checkpoint(tmp_path / "model")
    assert any("quantized, and decoded to the bfloat16" in note for note in view.format.notices(view))


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_stacks_of_experts(is_transposed: bool, block: int | None, tmp_path: Path) -> None:
    """Their scales end with the name of the stack, as in transformers' `FP8Experts`, and may be one for each expert."""
    save_whole("qwen3_vl_moe", tmp_path / "plain")
    stored, decoded = tensors(tmp_path / "plain"), dict[str, torch.Tensor]()
    codes_and_scales = dict[str, torch.Tensor]()
    for name in [name for name in stored if ".experts." in name]:
        stack = stored[name].mT if is_transposed else stored[name]
        rows, columns = (block, block) if block else stack.shape[1:]
        of_experts = [by_blocks(matrix.contiguous(), rows, columns) for matrix in stack]
        codes, scales = (torch.stack(parts) for parts in zip(*of_experts, strict=True))
        spread = scales.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
        decoded[name] = codes.float() * spread
        codes_and_scales |= {name: codes, f"{name}_scale_inv": scales, f"{name}_activation_scale": torch.ones(4)}
    save_file(stored | decoded, tmp_path / "plain" / "model.safetensors")
    shutil.copytree(tmp_path / "plain", tmp_path / "model")
    save_file(stored | codes_and_scales, tmp_path / "model" / "model.safetensors")
    declare(tmp_path / "model", {"quant_method": "fp8", "weight_block_size": [block, block] if block else None})
    assert mcore_ckpt_ext.compare(tmp_path / "plain", tmp_path / "model").equal
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist(loop="bridge"))
    mcore_ckpt_ext.convert(tmp_path / "plain", tmp_path / "of plain", mcore_ckpt_ext.TorchDist(loop="bridge"))
    assert mcore_ckpt_ext.compare(tmp_path / "run", tmp_path / "of plain").equal
    assert verify(tmp_path / "model").sound


def test_scales_that_are_exponents_of_two(tmp_path: Path) -> None:
    """E8M0 in safetensors, which earlier releases stored as its bytes."""
    make("llama", tmp_path / "model", torch.bfloat16)
    quantize(tmp_path / "model", "blocks")
    file = tmp_path / "model" / "model.safetensors"
    stored, expected = load_file(file), dict[str, torch.Tensor]()
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        exponents = (stored[name].log2().ceil() + 127).to(torch.uint8)
        stored[name] = exponents.view(torch.float8_e8m0fnu)
        weight = name.removesuffix("_scale_inv")
        expected[weight] = dequantized_blocks(stored[weight], torch.exp2(exponents.float() - 127))
    save_file(stored, file)
    assert verify(tmp_path / "model").sound
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    found = tensors(tmp_path / "back")
    assert expected
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    stored[name].view(torch.uint8)[0, 0] = 255  # NaN
    save_file(stored, file)
    assert not verify(tmp_path / "model").sound


def test_a_model_whose_cache_alone_is_quantized(tmp_path: Path) -> None:
    """compressed-tensors then names no group of weights."""
    make("llama", tmp_path / "model", torch.bfloat16)
    before = load_file(tmp_path / "model" / "model.safetensors")
    scale = {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}
    save_file({**before, **scale}, tmp_path / "model" / "model.safetensors")
    settings = {**COMPRESSED, "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    declare(tmp_path / "model", settings)
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    found = tensors(tmp_path / "back")
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def declare(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


@pytest.mark.parametrize("how", ["blocks", "channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_scales_of_weights_that_are_no_codes_of_their_kind(how: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Multiplied by their scales, weights that are decoded already (or frozen for training) would be others."""
    make("llama", tmp_path, torch.bfloat16)
    expected = quantize(tmp_path, how)
    name = "model.layers.0.mlp.up_proj.weight"
    stored = load_file(tmp_path / "model.safetensors")
    save_file({**stored, name: expected[name].to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(UnreadableCheckpointError, match=f"not quantized as config.json describes; found: {name} in"):
        open_checkpoint(tmp_path)
    assert not verify(tmp_path).sound


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_codes_without_a_word_about_them(dtype: torch.dtype, tmp_path: Path) -> None:
    make("llama", tmp_path / "model", torch.bfloat16)
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    save_file({name: tensor.to(dtype) if "_proj" in name else tensor for name, tensor in stored.items()}, file)
    named = str(dtype).removeprefix("torch.")
    with pytest.raises(UnsupportedCheckpointError, match=f"does not say how; found: model.* in {named}"):
        open_checkpoint(tmp_path / "model")


def pad_to_blocks(folder: Path) -> None:
    """Pad the only matrix whose rows are not a multiple of the block's: 16 + 4 rows become 16 + 8."""
    config = json.loads((folder / "config.json").read_text())
    assert config["qk_rope_head_dim"] == 4
    config["qk_rope_head_dim"] = config["head_dim"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        if "kv_a_proj" in name or "q_b_proj" in name:
            more = 4 if "kv_a" in name else 16
            stored[name] = torch.cat([tensor, torch.randn(more, tensor.shape[1], dtype=tensor.dtype)])
    save_file(stored, folder / "model.safetensors")


def test_blocks_at_the_edge_and_any_range() -> None:
    """576 rows are 4.5 blocks, as in DeepSeek's `kv_a_proj_with_mqa`; ranges begin anywhere."""
    generator = torch.Generator().manual_seed(1)
    rows, columns, block = 9, 10, (4, 4)
    codes = torch.randn(rows, columns, generator=generator).to(FP8)
    scales = torch.rand(3, 3, generator=generator)
    whole = scales.repeat_interleave(4, 0)[:rows].repeat_interleave(4, 1)[:, :columns]
    expected = (codes.float() * whole).bfloat16().view(-1)
    nowhere = RawArray("", 0, 0, "float8_e4m3fn", 0)
    extent = QuantizedMatrix(nowhere, nowhere, rows, columns, block, "bfloat16")
    for first in range(rows * columns):
        for count in (1, 3, columns, 25, rows * columns):
            stop = min(first + count, rows * columns)
            found = decode(
                extent, first, stop - first, lambda at, n: codes.view(-1)[at : at + n],
                lambda at, n: scales.view(-1)[at : at + n],
            )  # fmt: skip
            assert torch.equal(found, expected[first:stop])


@pytest.mark.parametrize("block", [(1 << 20, 1 << 20), (1, 1 << 20), (3, 1)])
def test_a_block_larger_than_its_matrix_takes_no_more_memory(
    block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is longer than one decoding step is decoded in parts."""
    monkeypatch.setattr(scaled, "_AT_ONCE", 8)
    rows, columns = 6, 11
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    codes, scales = torch.randn(rows, columns).to(FP8), torch.rand(grid)
    largest = [0]

    def look(values: torch.Tensor, at: int, count: int) -> torch.Tensor:
        largest[0] = max(largest[0], count)
        return values.view(-1)[at : at + count]

    nowhere = RawArray("", 0, 0, "float8_e4m3fn", 0)
    extent = QuantizedMatrix(nowhere, nowhere, rows, columns, block, "float32")
    found = decode(extent, 2, 60, lambda at, n: look(codes, at, n), lambda at, n: look(scales, at, n))
    height, width = min(block[0], rows), min(block[1], columns)
    spread = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    assert torch.equal(found, (codes.float() * spread).view(-1)[2:62])
    assert largest[0] <= columns


def test_four_bit_floats_are_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(2)
    experts, rows, groups = 2, 3, 4
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (experts, rows, groups), dtype=torch.uint8, generator=generator)
    expected = dequantized_experts(blocks, scales).transpose(1, 2).reshape(-1)
    nowhere = RawArray("", 0, 0, "uint8", 0)
    extent = QuantizedMatrix(nowhere, nowhere, experts * rows, groups * 32, (1, 32), "bfloat16", packed=True)
    for first, count in ((0, expected.numel()), (5, 200), (31, 2), (127, 130)):
        found = decode(
            extent, first, count, lambda at, n: blocks.view(-1)[at : at + n], lambda at, n: scales.view(-1)[at : at + n]
        )
        assert torch.equal(found, expected[first : first + count])


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """The gate and up rows of 4-bit experts alternate; exported, they equal the tensors of transformers."""
    folder, generator = tmp_path / "model", torch.Generator().manual_seed(3)
    make("gpt_oss", folder, torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    hidden, width, experts = config["hidden_size"], 64, config["num_local_experts"]
    config |= {"intermediate_size": width, "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    stored, expected = load_file(folder / "model.safetensors"), {}
    for name in list(stored):
        if name.endswith("gate_up_proj_bias"):
            stored[name] = torch.randn(experts, 2 * width, generator=generator).bfloat16()
        elif name.endswith(("gate_up_proj", "down_proj")):
            del stored[name]
            rows, columns = (2 * width, hidden) if "up" in name else (hidden, width)
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 130, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = dequantized_experts(blocks, scales).contiguous()
    save_file(stored, folder / "model.safetensors")
    mcore_ckpt_ext.convert(folder, tmp_path / "run", torch_dist("gpt_oss"), memory_limit=1)
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace(), memory_limit=1)
    found = tensors(tmp_path / "back")
    name = "model.layers.0.mlp.experts.down_proj"
    blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    for changed, message in (
        ({f"{name}_scales": scales.view(torch.int8)}, "do not match them; found: scales .* in int8"),
        ({f"{name}_scales": scales.float()}, "do not match them; found: scales .* in float32"),
        ({f"{name}_blocks": blocks.view(torch.int8)}, "not quantized as config.json describes"),
        ({name: expected[name]}, f"stored twice, quantized and as it is; found: {name}_blocks and {name}"),
    ):
        save_file({**stored, **changed}, folder / "model.safetensors")
        with pytest.raises(UnreadableCheckpointError, match=message):
            open_checkpoint(folder)
    expected |= {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"), ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors .pack-quantized."),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "bitsandbytes;"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
         "compressed-tensors .transform_config."),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "compressed-tensors .sparsity_config."),
        (json.loads(json.dumps(COMPRESSED).replace("8", "4")), "compressed-tensors"),
        (json.loads(json.dumps(COMPRESSED).replace("channel", "group")), "compressed-tensors"),
    ],
)  # fmt: skip
def test_other_quantization_schemes_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    make("llama", tmp_path)
    declare(tmp_path, settings)
    with pytest.raises(UnsupportedCheckpointError, match=f"found: {message}"):
        open_checkpoint(tmp_path)


def test_codes_without_scales(tmp_path: Path) -> None:
    make("llama", tmp_path, torch.bfloat16)
    quantize(tmp_path, "blocks")
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    scales = stored.pop(f"{name}_scale_inv")
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UnreadableCheckpointError, match=f"have no scales; found: {name}"):
        open_checkpoint(tmp_path)
    save_file({**stored, f"{name}_scale_inv": scales[:-1]}, tmp_path / "model.safetensors")
    with pytest.raises(UnreadableCheckpointError, match="do not match them"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_refused(value: float) -> None:
    scales = torch.tensor([[1.0, value]])
    extent = QuantizedMatrix(
        RawArray("a", 0, 0, "float8_e4m3fn", 0), RawArray("b", 0, 0, "float32", 2), 2, 4, (2, 2), "bfloat16"
    )
    codes = torch.ones(8).to(FP8)
    with pytest.raises(
        UnreadableCheckpointError, match="a scale of quantized weights is not a finite number; where: b"
    ):
        decode(extent, 0, 8, lambda at, n: codes[at : at + n], lambda at, n: scales.view(-1)[at : at + n])
