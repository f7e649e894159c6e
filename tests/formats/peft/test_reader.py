"""Tests PEFT folders: the merged weights, and the refusal of unsupported adapters by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt_ext import HuggingFace, Legacy, TorchDist
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.huggingface import tensors
from tests.harness.peft import ALPHA, RANK, Tensors, adapter, peft_folder

_MOE = "model.layers.0.block_sparse_moe"
QV = {"target_modules": ["q_proj", "v_proj"]}
NORMS = "lora_magnitude_vector"
ENDS = ("lora_A.weight", "lora_B.weight", NORMS)
Q = "model.layers.0.self_attn.q_proj"


def of_queries_and_values() -> Tensors:
    """Return peft's default adapters of a Llama."""
    found: Tensors = {}
    for layer in range(2):
        before = f"model.layers.{layer}.self_attn"
        found |= adapter(f"{before}.q_proj", 32, 32) | adapter(f"{before}.v_proj", 16, 32)
    return found


@pytest.mark.parametrize(("by_root", "divisor"), [(False, 3.0), (True, 3.0**0.5)])
def test_some_linears_are_merged_and_the_others_are_the_same_bits(
    models: dict[str, Path], tmp_path: Path, by_root: bool, divisor: float
) -> None:
    content = of_queries_and_values()
    there = peft_folder(tmp_path / "peft", content, use_rslora=by_root)
    report = convert(there, tmp_path / "merged", HuggingFace(), merge=models["llama"])
    assert "adapters are merged into 2 weights, in fp32, and rounded once" in report.notes
    base, found = tensors(models["llama"]), tensors(tmp_path / "merged")
    for name, weight in base.items():
        before = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{before}.lora_A.weight" in content:
            product = content[f"{before}.lora_B.weight"] @ content[f"{before}.lora_A.weight"]
            assert torch.equal(found[name], weight + product * (ALPHA / divisor)), name
        else:
            assert torch.equal(found[name], weight), name
    with pytest.raises(CheckpointError, match="rank, not by its root" if by_root else "CanonicalLoRA of a part of a"):
        convert(there, tmp_path / "run", TorchDist(), weights=models["llama"])


@pytest.mark.parametrize("linears", [("gate_proj",), ("gate_proj", "up_proj")])
def test_dora_of_parts_of_a_gated_mlp_is_merged(
    models: dict[str, Path], tmp_path: Path, linears: tuple[str, ...]
) -> None:
    base, content = tensors(models["llama"]), dict[str, torch.Tensor]()
    names = [f"model.layers.0.mlp.{linear}" for linear in linears]
    for name in names:
        rows, columns = base[f"{name}.weight"].shape
        content |= adapter(name, rows, columns) | {f"base_model.model.{name}.{NORMS}": torch.rand(rows) + 1}
    there = peft_folder(tmp_path / "peft", content, use_dora=True)
    convert(there, tmp_path / "merged", HuggingFace(), merge=models["llama"])
    found = tensors(tmp_path / "merged")
    for name in names:
        into, out, norms = (content[f"base_model.model.{name}.{end}"] for end in ENDS)
        whole = base[f"{name}.weight"] + out @ into * (ALPHA / RANK)
        expected = norms[:, None] / torch.linalg.norm(whole, dim=1, keepdim=True) * whole
        assert torch.allclose(found[f"{name}.weight"], expected, rtol=1e-6, atol=1e-6), name
    with pytest.raises(CheckpointError, match="DoRA of linears with different lora_A"):
        convert(there, tmp_path / "run", TorchDist(), weights=models["llama"])


@pytest.mark.parametrize(
    "config",
    [
        {**QV, "layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]}, {"target_modules": r".*\.[qv]_proj"},
        {"target_modules": "all-linear", "exclude_modules": r".*\.(k_proj|o_proj|mlp\..*)"},
        {**QV, "r": 7, "rank_pattern": {"self_attn.q_proj": 3, ".*": 3}}, {**QV, "layers_to_transform": []},
        {**QV, "use_rslora": None, "task_type": "CAUSAL_LM"},
    ],
)  # fmt: skip
def test_equivalent_peft_configurations_are_read(
    models: dict[str, Path], tmp_path: Path, config: dict[str, Any]
) -> None:
    there = peft_folder(tmp_path / "peft", of_queries_and_values(), **config)
    assert len(open_checkpoint(there, weights=models["llama"]).names("weight")) == 8


def test_it_is_shown_with_its_model_and_requires_it(models: dict[str, Path], tmp_path: Path) -> None:
    there = peft_folder(tmp_path / "peft", of_queries_and_values())
    with pytest.raises(CheckpointError, match=r"an adapter \(LoRA\), not a model.*--weights FOLDER"):
        convert(there, tmp_path / "run", TorchDist())
    assert inspect(there, weights=models["llama"]).format == "peft"
    names = open_checkpoint(there, weights=models["llama"]).names("weight")
    assert "decoder.layers.1.self_attention.linear_qkv.adapter.adapter_v.linear_out.weight" in names


def test_a_config_of_the_model_may_lie_beside_it(models: dict[str, Path], tmp_path: Path) -> None:
    there = peft_folder(tmp_path / "peft", of_queries_and_values())
    convert(there, tmp_path / "alone", HuggingFace(), merge=models["llama"])
    shutil.copy(models["llama"] / "config.json", there)
    assert verify(there).sound
    convert(there, tmp_path / "beside", HuggingFace(), merge=models["llama"])
    assert compare(tmp_path / "alone", tmp_path / "beside").equal
    shutil.copy(models["llama"] / "model.safetensors", there)
    with pytest.raises(CheckpointError, match="a model and an adapter .* loads together.*to a folder of their own"):
        convert(there, tmp_path / "both", HuggingFace())


def test_another_model_than_they_name_is_reported(models: dict[str, Path], tmp_path: Path) -> None:
    """The shapes of another model may be the same."""
    there = peft_folder(tmp_path / "peft", of_queries_and_values(), base_model_name_or_path="someone/llama")
    for name, count in (("llama", 0), ("mistral", 1)):
        report = convert(there, tmp_path / name, HuggingFace(), merge=models[name])
        assert len([note for note in report.notes if "trained for someone/llama, and " in note]) == count


def without(end: str) -> Callable[[Tensors], Tensors]:
    return lambda content: {name: tensor for name, tensor in content.items() if not name.endswith(end)}


def with_more(module: str, out: int = 32, into: int = 32) -> Callable[[Tensors], Tensors]:
    return lambda content: content | adapter(module, out, into)


def without_layer_1(content: Tensors) -> Tensors:
    return {name: tensor for name, tensor in content.items() if "layers.1" not in name}


def with_norms(content: Tensors) -> Tensors:
    return content | {f"base_model.model.{Q}.{NORMS}": torch.rand(32) + 1}


def with_nan(content: Tensors) -> Tensors:
    content[f"base_model.model.{Q}.lora_B.weight"][1, 1] = float("nan")
    return content


def of_integers(content: Tensors) -> Tensors:
    return {name: tensor.to(torch.int8) if name.endswith("B.weight") else tensor for name, tensor in content.items()}


@pytest.mark.parametrize(
    ("config", "changed", "model", "said"),
    [
        ({"alpha_pattern": {"q_proj": 4}}, dict, "llama", "alpha_pattern: {'q_proj': 4}"),
        ({"init_lora_weights": "pissa"}, dict, "llama", "init_lora_weights: 'pissa'"),
        ({"bias": "all"}, dict, "llama", "bias: 'all'"),
        ({"modules_to_save": ["lm_head"]}, dict, "llama", "modules_to_save"),
        ({"target_parameters": ["experts.w1"]}, dict, "llama", "target_parameters"),
        ({"a_new_key": 1}, dict, "llama", "a_new_key: 1"),
        ({"peft_type": "LOHA"}, dict, "llama", "peft_type: 'LOHA'"),
        ({}, without("layers.0.self_attn.q_proj.lora_B.weight"), "llama", "only one of lora_A and lora_B"),
        ({}, without("layers.0.self_attn.q_proj.lora_A.weight"), "llama", "only one of lora_A and lora_B"),
        ({}, with_more("model.embed_tokens", 250), "llama", "unknown: base_model.model.model.embed_tokens.lora_A"),
        ({}, with_more("lm_head", 250), "llama", "unknown: base_model.model.lm_head.lora_A.weight"),
        ({}, with_more("model.layers.1.self_attn.o_proj", 31), "llama", "does not have the shape of its linear"),
        ({}, with_more(f"{_MOE}.gate", 4), "mixtral", "unknown: .*block_sparse_moe.gate.lora_A"),
        ({}, with_more(f"{_MOE}.experts.0.w1", 48), "mixtral", "unknown: .*experts.0.w1.lora_A"),
        ({"r": 16}, dict, "llama", "rank 16 in r or rank_pattern, 3 of model.layers.0.self_attn.q_proj"),
        ({"r": None}, dict, "llama", "rank None in r"),
        ({"rank_pattern": {"q_proj": 8}}, dict, "llama", "rank 8 in r or rank_pattern, 3 of .*q_proj"),
        ({"target_modules": ["q_proj"]}, dict, "llama", "not in target_modules: model.layers.0.self_attn.v_proj"),
        ({"target_modules": ".*q_proj"}, dict, "llama", "not in target_modules: .*v_proj"),
        ({"target_modules": "all-linear"}, dict, "llama", "in target_modules, and without an adapter: .*k_proj"),
        ({"target_modules": None}, dict, "llama", "target_modules: None"),
        ({"target_modules": "("}, dict, "llama", r"target_modules: '\('"),
        ({"exclude_modules": ["v_proj"]}, dict, "llama", "not in target_modules: .*v_proj"),
        ({**QV, "layers_to_transform": [0]}, dict, "llama", "not in target_modules: model.layers.1"),
        ({**QV, "layers_to_transform": 1, "layers_pattern": "h"}, dict, "llama", "not in target_modules: .*layers.0"),
        ({**QV, "layers_pattern": "layers"}, dict, "llama", "layers_pattern: 'layers'"),
        ({"target_modules": ".*", "layers_to_transform": [0]}, dict, "llama", r"layers_to_transform: \[0\]"),
        (QV, without_layer_1, "llama", "without an adapter: model.layers.1.self_attn.q_proj"),
        ({"use_dora": True}, dict, "llama", "use_dora: True, no lora_magnitude_vector of .*layers.0.self_attn.q_proj"),
        ({}, with_norms, "llama", "use_dora: False, a lora_magnitude_vector of .*layers.0.self_attn.q_proj"),
        ({"use_rslora": "false"}, dict, "llama", "use_rslora: 'false'"),
        ({"task_type": "SEQ_CLS"}, dict, "llama", "task_type: 'SEQ_CLS'"),
        ({}, of_integers, "llama", "layers.0.self_attn.q_proj.lora_B.weight: int8"),
        ({"lora_alpha": None}, dict, "llama", "the alpha of the adapters is missing or invalid"),
        ({"lora_alpha": float("nan")}, dict, "llama", "missing or invalid; found: alpha: nan"),
        ({"lora_alpha": float("inf")}, dict, "llama", "missing or invalid; found: alpha: inf"),
        ({"lora_alpha": 0}, dict, "llama", "missing or invalid; found: alpha: 0"),
        ({"lora_alpha": "8"}, dict, "llama", "missing or invalid; found: alpha: '8'"),
        ({}, with_nan, "llama", "not finite; where: .*layers.0.self_attention.linear_qkv.adapter.adapter_q"),
    ],
)  # fmt: skip
def test_unsupported_merges_are_refused_by_name(
    models: dict[str, Path], tmp_path: Path, config: dict[str, Any], changed: Any, model: str, said: str
) -> None:
    there = peft_folder(tmp_path / "peft", changed(of_queries_and_values()), **config)
    with pytest.raises(CheckpointError, match=said):
        convert(there, tmp_path / "merged", HuggingFace(), merge=models[model])
    assert not (tmp_path / "merged").exists()


def of_every_layer(module: str, out: int, into: int) -> dict[str, torch.Tensor]:
    return {**adapter(module.format(0), out, into), **adapter(module.format(1), out, into)}


@pytest.mark.parametrize("layer", [0, 1])
def test_adapters_in_some_layers_only(layer: int, models: dict[str, Path], tmp_path: Path) -> None:
    """Megatron-Bridge does not support such adapters; those of the first layers would fit a smaller model."""
    there = peft_folder(tmp_path / "peft", adapter(f"model.layers.{layer}.self_attn.o_proj", 32, 32))
    with pytest.raises(
        CheckpointError, match=rf"every layer, or of none.*layers\.{1 - layer}\.self_attention\.linear_proj"
    ):
        convert(there, tmp_path / "run", TorchDist(loop="bridge"), weights=models["llama"])
    convert(there, tmp_path / "merged", HuggingFace(), merge=models["llama"])


def test_omitted_keys_have_the_defaults_of_peft(models: dict[str, Path], tmp_path: Path) -> None:
    content = of_every_layer("model.layers.{}.self_attn.o_proj", 32, 32)
    there = peft_folder(tmp_path / "peft", content, base_model_name_or_path="someone/other")
    told = json.loads((there / "adapter_config.json").read_text())
    del told["lora_alpha"]
    (there / "adapter_config.json").write_text(json.dumps(told))
    report = convert(there, tmp_path / "run", TorchDist(loop="bridge"), weights=models["llama"])
    assert any("trained for someone/other, and " in note for note in report.notes)
    (file,) = (tmp_path / "run").rglob("run_config.yaml")
    assert json.loads(file.read_text())["peft"]["alpha"] == 8


def test_legacy_files_have_none(models: dict[str, Path], tmp_path: Path) -> None:
    content = of_every_layer("model.layers.{}.self_attn.o_proj", 32, 32)
    there = peft_folder(tmp_path / "peft", content)
    with pytest.raises(CheckpointError, match="adapters are not written as legacy"):
        convert(there, tmp_path / "run", Legacy(), weights=models["llama"])
    convert(there, tmp_path / "run", TorchDist(loop="bridge"), weights=models["llama"])
    (folder,) = (path.parent for path in (tmp_path / "run").rglob("run_config.yaml"))
    told = json.loads((folder / "run_config.yaml").read_text())["peft"]
    assert told["target_modules"] == ["linear_proj"]
    assert (told["dim"], told["alpha"]) == (RANK, ALPHA)
