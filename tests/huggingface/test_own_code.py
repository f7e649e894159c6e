"""Tests families without a transformers class with models and outputs of their own code.

Such a model in Megatron equals one of a family with a transformers class: exported as that family, it gives the logits
of its own code. `tests/jobs` compares Megatron with that family.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.families.recognition import family_named
from mcore_ckpt_ext.families.rules import parameter_shapes
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from tests.harness.witnesses import COMPUTES_AS, OF_OWN_CODE

FOLDER = Path(__file__).with_name("own_code")
TOKENS = torch.arange(40).view(2, 20) * 7 % 64
WEIGHTS = "model.safetensors"


def _block(**attention: object) -> dict[str, object]:
    """A layer of Llama-Nemotron."""
    return {"attention": {"no_op": False, "n_heads_in_group": 2, **attention}, "ffn": {"no_op": False, "ffn_mult": 2.0}}


@pytest.mark.parametrize("name", [*COMPUTES_AS, *OF_OWN_CODE])
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """All tensors and keys survive the round trip, except frequencies, which are not weights and are reported."""
    source = tmp_path / "model"
    _copy(FOLDER / name, source)
    report = mcore_ckpt_ext.convert(source, tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    expected, found = load_file(source / WEIGHTS), load_file(tmp_path / "back" / WEIGHTS)
    frequencies = {label for label in expected if label.endswith(".inv_freq")}
    assert found.keys() == expected.keys() - frequencies
    assert all(torch.equal(found[label], expected[label]) for label in found)
    told = [*report.notes, *(item.key for item in report.unread)]
    assert not frequencies or any("inv_freq" in words for words in told)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("empty", [2, 3])
def test_a_layer_without_parameters(empty: int, tmp_path: Path) -> None:
    """As Llama-Nemotron Ultra has many: the files of a stage do not show how many layers it has."""
    source, stored, legacy = (tmp_path / name for name in ("model", "stored", "legacy"))
    _copy(FOLDER / "nemotron-nas", source)
    config = json.loads((source / "config.json").read_text())
    config["block_configs"][empty] = {
        "attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"no_op": True, "ffn_mult": None},
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    kept = {name: t for name, t in load_file(source / WEIGHTS).items() if f"layers.{empty}." not in name}
    save_file(kept, source / WEIGHTS, {"format": "pt"})
    mcore_ckpt_ext.convert(source, stored, mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(
        stored, legacy, mcore_ckpt_ext.Legacy(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    )
    mcore_ckpt_ext.convert(legacy, tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    found = load_file(tmp_path / "back" / WEIGHTS)
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_ling_under_its_other_type(tmp_path: Path) -> None:
    """The type of the folder is kept, although Megatron's arguments do not show it."""
    source = tmp_path / "model"
    _copy(FOLDER / "bailing_moe_v2", source)
    config = {**json.loads((source / "config.json").read_text()), "model_type": "bailing_moe"}
    (source / "config.json").write_text(json.dumps(config))
    mcore_ckpt_ext.convert(source, tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    assert load_file(tmp_path / "back" / WEIGHTS).keys() == load_file(source / WEIGHTS).keys()


@pytest.mark.parametrize(("name", "family"), COMPUTES_AS.items())
def test_it_answers_as_its_own_code_does(name: str, family: str, tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(FOLDER / name, tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "other", mcore_ckpt_ext.HuggingFace(), family=family)
    truth = load_file(FOLDER / name / "logits.safetensors")["logits"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "other", attn_implementation="eager")
    with torch.no_grad():
        difference = (model(TOKENS).logits - truth).abs().max() / truth.abs().max()
    assert difference <= 1e-6


@pytest.mark.parametrize(("name", "family"), COMPUTES_AS.items())
def test_megatron_holds_the_parameters_of_the_other_family(name: str, family: str) -> None:
    """Resuming an optimizer under another layout only depends on names and shapes, as `tests/jobs` shows."""
    own = family_named(name)
    arguments = own.arguments(json.loads((FOLDER / name / "config.json").read_text()))
    assert parameter_shapes(own.tensors(arguments)) == parameter_shapes(family_named(family).tensors(arguments))


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("chatglm", {"rope_ratio": 50}, "rope_ratio"),
        ("chatglm", {"multi_query_attention": False}, "multi_query_attention"),
        ("chatglm", {"padded_vocab_size": 128}, "vocab_size"),
        ("qwen", {"kv_channels": 16}, "kv_channels"),
        ("deepseek", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("internlm2", {"bias": True}, "bias"),
        ("bailing_moe_v2", {"use_qk_norm": False}, "use_qk_norm"),
        ("bailing_moe_v2", {"score_function": "softmax"}, "score_function"),
        ("exaone", {"activation_function": "gelu"}, "activation_function"),
        ("orion", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("internlm2", {"rope_scaling": {"type": "longrope"}}, "longrope"),
        ("sarvam_moe", {"use_bias": True}, "use_bias"),
        ("nemotron-nas", {"num_hidden_layers": 5}, "4 blocks"),
        ("nemotron-nas", {"rope_scaling": None}, "llama3"),
        ("nemotron-nas", {"block_configs": [_block(window_length=8)] * 4}, r"block_configs.0..attention.window_length"),
        ("nemotron-nas", {"block_configs": [_block(n_heads_in_group=4), *[_block()] * 3]}, "one number for all layers"),
        ("nemotron-nas", {"block_configs": [_block(replace_with_linear=True)] * 4}, "replace_with_linear"),
    ],
)
def test_features_that_megatron_lacks_are_refused(name: str, changed: dict[str, object], said: str) -> None:
    config = json.loads((FOLDER / name / "config.json").read_text())
    with pytest.raises(UnsupportedCheckpointError, match=said):
        family_named(name).arguments({**config, **changed})


@pytest.mark.parametrize("name", ["bailing_moe_v2", "sarvam_moe"])
def test_keys_of_windows_that_the_code_does_not_read(name: str) -> None:
    config = json.loads((FOLDER / name / "config.json").read_text())
    changed = {**config, "sliding_window": 4096, "use_sliding_window": False}
    assert family_named(name).arguments(changed) == family_named(name).arguments(config)


@pytest.mark.parametrize("name", ["internlm2", "qwen"])
def test_the_length_up_to_which_megatron_computes_the_same_is_reported(name: str) -> None:
    assert any(
        "more than 64 tokens" in notice
        for notice in open_checkpoint(FOLDER / name).format.notices(open_checkpoint(FOLDER / name))
    )


def _copy(source: Path, folder: Path) -> None:
    """Copy a folder without the recorded output."""
    folder.mkdir()
    for name in ("config.json", WEIGHTS):
        (folder / name).write_bytes((source / name).read_bytes())
