"""The text of models that also see images: it is a model of its family, which answers as the whole does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import mcore_ckpt_ext
from tests.harness.huggingface import assert_same_tensors, tensors

TEXT: dict[str, Any] = {
    "vocab_size": 250, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
}
_AXES = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [1, 1, 2]}
_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", {**TEXT, "rope_parameters": _AXES}, {**_VISION, "fullatt_block_indexes": [0]}),
    "qwen3_vl": (
        "Qwen3VL", {**TEXT, "head_dim": 8, "rope_parameters": {**_AXES, "mrope_interleaved": True}},
        {**_VISION, "deepstack_visual_indexes": []},
    ),
    "qwen3_5": ("Qwen3_5", {**TEXT, "num_hidden_layers": 4, "head_dim": 16, **_NET}, _VISION),
}  # fmt: skip


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
WITH_EXPERTS = {"qwen3_vl_moe": ("Qwen3VLMoe", {**WHOLE["qwen3_vl"][1], **_EXPERTS}, WHOLE["qwen3_vl"][2])}


def made(name: str, folder: Path) -> Any:
    kind, text, vision = (WHOLE | WITH_EXPERTS)[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(config).float().eval()
    with torch.no_grad():
        for label, tensor in model.named_parameters():
            tensor.copy_(0.3 * torch.randn_like(tensor) + ("norm" in label))
            if "linear_attn.norm" in label:
                tensor.copy_((tensor.abs() + 0.5).clamp(max=2))  # less 1 without rounding
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", WHOLE)
def test_the_text_answers_as_the_whole_does(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path / "whole")
    report = mcore_ckpt_ext.convert(tmp_path / "whole", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    assert any(note.startswith(f"of {name} only the text is read, as a Qwen") for note in report.notes)
    told = re.compile(r"left out, because Megatron has no place for it: (model\.)?visual\.")
    assert any(map(told.match, report.notes))
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "text", mcore_ckpt_ext.HuggingFace())
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    of_text = {
        label.replace("model.language_model.", "model."): tensor
        for label, tensor in tensors(tmp_path / "whole").items() if "visual" not in label
    }  # fmt: skip
    found = tensors(tmp_path / "text")
    assert found.keys() == of_text.keys()
    assert all(torch.equal(found[label], tensor) for label, tensor in of_text.items())
    mcore_ckpt_ext.convert(tmp_path / "text", tmp_path / "again", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "again", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert_same_tensors(tmp_path / "text", tmp_path / "back")


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_that_lie_transposed(transposed: bool, tmp_path: Path) -> None:
    """As Qwen3-VL-30B-A3B was released; transformers 5 writes them the other way, and reads both."""
    model = made("qwen3_vl_moe", tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    stored = tensors(tmp_path / "whole")
    stacked = {name for name in stored if ".mlp.experts." in name}
    assert {stored[name].shape for name in stacked} == {(4, 24, 32), (4, 32, 12)}
    if transposed:
        turned = {name: stored[name].transpose(1, 2).contiguous() for name in stacked}
        save_file({**stored, **turned}, file)
    mcore_ckpt_ext.convert(tmp_path / "whole", tmp_path / "run", mcore_ckpt_ext.TorchDist(), memory_limit=1)
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "text", mcore_ckpt_ext.HuggingFace())
    found = tensors(tmp_path / "text")
    gate, up = stored["model.language_model.layers.1.mlp.experts.gate_up_proj"][3].chunk(2)
    assert torch.equal(found["model.layers.1.mlp.experts.3.gate_proj.weight"], gate)
    assert torch.equal(found["model.layers.1.mlp.experts.3.up_proj.weight"], up)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        answer = AutoModelForCausalLM.from_pretrained(tmp_path / "text")(tokens).logits
        torch.testing.assert_close(answer, model(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_configuration_without_a_part_for_its_text(tmp_path: Path) -> None:
    """As Qwen2.5-VL was released: all keys beside each other, and positions of the kind `mrope`."""
    made("qwen2_5_vl", tmp_path / "whole")
    file = tmp_path / "whole" / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    del text["rope_parameters"]
    flat = {**text, **config, "model_type": "qwen2_5_vl", "rope_theta": 1000000.0}
    file.write_text(json.dumps({**flat, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}))
    mcore_ckpt_ext.convert(tmp_path / "whole", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "text", mcore_ckpt_ext.HuggingFace())
    found = json.loads((tmp_path / "text" / "config.json").read_text())
    assert (found["model_type"], found["rope_scaling"], found["rope_theta"]) == ("qwen2", None, 1000000.0)
