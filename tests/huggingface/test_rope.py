"""Tests RoPE whose base changes for texts that are longer than `max_position_embeddings`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from mcore_ckpt_ext import HuggingFace, TorchDist, convert
from mcore_ckpt_ext.families.recognition import family_named
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from tests.harness.huggingface import POSITIONS, VOCABULARY

_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 6.0}


def test_dynamic_scaling_is_read_up_to_the_length_where_it_begins(models: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(models["llama"], model)
    unscaled = json.loads((model / "config.json").read_text())
    config = {**unscaled, "rope_parameters": _DYNAMIC}
    (model / "config.json").write_text(json.dumps(config))
    family = family_named("llama")
    assert family.arguments(config) == family.arguments(unscaled)
    notice = f"changes the base of RoPE (dynamic scaling) for texts of more than {POSITIONS} tokens"
    assert [notice in text for text in open_checkpoint(model).format.notices(open_checkpoint(model))].count(True) == 1
    assert not any(
        "dynamic" in text for text in open_checkpoint(models["llama"]).format.notices(open_checkpoint(models["llama"]))
    )
    convert(model, tmp_path / "run", TorchDist())
    convert(tmp_path / "run", tmp_path / "back", HuggingFace())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    tokens = torch.randint(0, VOCABULARY, (1, POSITIONS + 1), generator=torch.Generator().manual_seed(3))
    dynamic, plain = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, models["llama"]))
    with torch.no_grad():
        assert torch.equal(dynamic(tokens[:, :-1]).logits, plain(tokens[:, :-1]).logits)
        assert not torch.equal(dynamic(tokens).logits, plain(tokens).logits)
