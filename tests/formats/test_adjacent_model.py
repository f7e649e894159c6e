"""Test models of which verl's `huggingface/config.json` states what no other file does."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_ckpt_ext import HuggingFace, TorchDist, convert
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from tests.harness import huggingface

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}


def transformer_config() -> dict[str, Any]:
    """The fields of Megatron's class without functions, as verl writes them."""
    config = TransformerConfig(
        **SIZES, ffn_hidden_size=48, normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, layernorm_epsilon=1e-6, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    plain = (type(None), bool, int, float, str, list)
    return {name: value for name, value in values.items() if isinstance(value, plain)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of verl, whose weights are those of `model`."""
    root = tmp_path_factory.mktemp("verl")
    huggingface.make("llama", root / "model")
    convert(root / "model", root / "run", TorchDist(megatron_version="0.16.1"))
    role = root / "global_step_8" / "actor"
    shutil.copytree(root / "run" / "release", role / "dist_ckpt")
    common = role / "dist_ckpt" / "common.pt"
    state = torch.load(common, weights_only=False)
    torch.save({name: value for name, value in state.items() if name != "args"}, common)
    (role / "dist_ckpt" / "mcore_ckpt_ext_digests.json").unlink(missing_ok=True)
    (role / "huggingface").mkdir()
    shutil.copy(root / "model" / "config.json", role / "huggingface")
    (role / "transformer_config.json").write_text(json.dumps(transformer_config()))
    return root


@pytest.fixture
def role(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "global_step_8" / "actor", tmp_path / "global_step_8" / "actor"))


@pytest.mark.parametrize("below", ["", "dist_ckpt"])
def test_it_is_converted_without_an_argument(below: str, made: Path, role: Path, tmp_path: Path) -> None:
    assert "swiglu" not in transformer_config()
    convert(role / below, tmp_path / "out", HuggingFace())
    huggingface.assert_same_tensors(made / "model", tmp_path / "out")
    written, original = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", made / "model")
    )
    for key in ("vocab_size", "hidden_act", "rms_norm_eps", "max_position_embeddings"):
        assert written[key] == original[key]


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("num_attention_heads", 8, "num_attention_heads is 8, but transformer_config.json has 4"),
        ("model_type", "mystery", "is ignored"),
    ],
)
def test_one_that_contradicts_the_job_is_ignored(key: str, value: object, why: str, role: Path) -> None:
    place = role / "huggingface" / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), key: value}))
    checkpoint = open_checkpoint(role)
    assert any(why in problem for problem in checkpoint.format.notices(checkpoint))
    assert checkpoint.job.arguments().value("swiglu") is None


def test_one_that_contradicts_the_tensors_is_ignored(role: Path) -> None:
    stated = json.loads((role / "transformer_config.json").read_text())
    del stated["ffn_hidden_size"]
    (role / "transformer_config.json").write_text(json.dumps(stated))
    place = role / "huggingface" / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "intermediate_size": 64}))
    assert any(
        "linear_fc1.weight is (96, 32), not (128, 32)" in problem
        for problem in open_checkpoint(role).format.notices(open_checkpoint(role))
    )


@pytest.mark.parametrize(
    ("passed", "missing"),
    [
        ([], "--argument position_embedding_type=rope"),
        (["position_embedding_type=rope"], "--argument rotary_base=500000"),
        (["position_embedding_type=rope", "rotary_base=10000"], "--argument swiglu=true"),
    ],
)
def test_without_it_nothing_is_assumed(passed: list[str], missing: str, role: Path, tmp_path: Path) -> None:
    shutil.rmtree(role / "huggingface")
    target = HuggingFace(arguments=passed, vocab_size=huggingface.VOCABULARY)
    with pytest.raises(UnsupportedCheckpointError, match=missing):
        convert(role, tmp_path / "out", target)


def test_arguments_that_hints_name_are_enough(made: Path, role: Path, tmp_path: Path) -> None:
    shutil.rmtree(role / "huggingface")
    passed = ["position_embedding_type=rope", "rotary_base=10000", "swiglu=true", "max_position_embeddings=128"]
    convert(role, tmp_path / "out", HuggingFace(arguments=passed, vocab_size=huggingface.VOCABULARY))
    huggingface.assert_same_tensors(made / "model", tmp_path / "out")
