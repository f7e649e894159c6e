"""Test the requirements of a start from a Hugging Face folder for a job's arguments."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.hugging_face.model import described_model
from mcore_ckpt_ext.megatron.flags import wrap_validate_args
from mcore_ckpt_ext.megatron.sources.huggingface import check_arguments, model_folder

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 250, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    **LLAMA, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 8, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip


HYBRID: dict[str, Any] = {
    "model_type": "nemotron_h", "vocab_size": 250, "hidden_size": 32, "hybrid_override_pattern": "M-M*",
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8, "mamba_num_heads": 8,
    "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 4,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return described(tmp_path / "model", LLAMA)


def described(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


def arguments(folder: Path, **others: Any) -> Namespace:
    """Of a job that trains the model of a folder, as Megatron's parser would have them."""
    stated = described_model(folder).arguments.as_dict()
    return Namespace(**{**stated, "load": str(folder), "ckpt_format": "torch_dist", **others})


def refusal(given: Namespace) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_arguments(given)
    return str(caught.value)


@pytest.mark.parametrize("config", [LLAMA, EXPERTS], ids=["llama", "qwen3_moe"])
def test_equivalent_settings_are_accepted(config: dict[str, Any], tmp_path: Path) -> None:
    """Nor are dropout, the losses of routers, or how far positions go: those are the job's own."""
    folder = described(tmp_path / "model", config)
    own = {"attention_dropout": 0.2, "init_method_std": 0.5, "max_position_embeddings": 64, "moe_aux_loss_coeff": 0.1}
    check_arguments(arguments(folder, padded_vocab_size=256, **own))
    layers = {"moe_layer_freq": [1, 1]} if "num_experts" in config else {}
    check_arguments(arguments(folder, **layers))


def test_a_pattern_of_layers_may_be_cut_into_stages(tmp_path: Path) -> None:
    folder = described(tmp_path / "model", HYBRID)
    check_arguments(arguments(folder, hybrid_layer_pattern="M-|M*"))
    message = refusal(arguments(folder, hybrid_layer_pattern="M-|*M"))
    assert "hybrid_layer_pattern is 'M-|*M', not 'M-M*'" in message
    assert "--hybrid-layer-pattern 'M-M*'" in message


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("num_layers", 4, "num_layers is 4, not 2"),
        ("rotary_base", 500000, "rotary_base is 500000, not 10000"),
        ("layernorm_epsilon", 1e-5, "layernorm_epsilon is 1e-05, not 1e-06"),
        ("swiglu", False, "swiglu is False, not True"),
        ("qk_layernorm", True, "qk_layernorm is True, for which it has no key"),
        ("num_experts", 8, "num_experts is 8, for which it has no key"),
        ("use_mup", True, "use_mup is True, for which it has no key"),
        ("untie_embeddings_and_output_weights", False, "untie_embeddings_and_output_weights is False, not True"),
    ],
)
def test_a_contradiction_is_named_with_what_would_be_right(name: str, value: Any, told: str, model: Path) -> None:
    message = refusal(arguments(model, **{name: value}))
    assert told in message
    assert str(model / "config.json") in message
    assert "--num-layers 2" in message
    assert "--rotary-base" not in message.partition("hint")[2]  # 10000 is Megatron's own


def test_settings_without_a_flag_are_refused(tmp_path: Path) -> None:
    folder = described(tmp_path / "model", {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert "rotary_seq_len_interpolation_factor should be 2" in refusal(arguments(folder))
    check_arguments(arguments(folder, gtp_weight_remat_size=1))  # passed on since 0.19


@pytest.mark.parametrize(
    ("option", "value", "flag"),
    [
        ("use_megatron_fsdp", True, "--use-megatron-fsdp"),
        ("ckpt_format", "fsdp_dtensor", "--ckpt-format fsdp_dtensor"),
        ("non_persistent_ckpt_type", "local", "--non-persistent-ckpt-type"),
    ],
)
def test_unsupported_options_are_refused(option: str, value: Any, flag: str, model: Path) -> None:
    message = refusal(arguments(model, **{option: value}))
    assert f"found: {flag}" in message
    assert "mcore-ckpt convert" in message


def test_a_checkpoint_counts_for_more_than_a_model(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    job = arguments(model, load=str(run), pretrained_checkpoint=str(model))
    assert model_folder(job) == model
    (run / "latest_checkpointed_iteration.txt").write_text("4")
    assert model_folder(job) is None
    assert model_folder(arguments(model, ckpt_step=4)) is None
    assert model_folder(arguments(model)) == model
    (model / "latest_checkpointed_iteration.txt").write_text("4")
    assert model_folder(arguments(model)) is None


def test_a_configuration_alone_is_no_model(model: Path) -> None:
    """A run folder may hold a file of that name, whoever wrote it, before its first checkpoint."""
    (model / "model.safetensors").unlink()
    assert model_folder(arguments(model)) is None
    check_arguments(arguments(model, num_layers=7))
    assert "--load names no Hugging Face folder" in refusal(arguments(model, ckpt_ext_from_hf=True))


def test_the_flag_requires_a_folder(model: Path, tmp_path: Path) -> None:
    asked = {"ckpt_ext_from_hf": True}
    check_arguments(arguments(model, **asked))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "--load names no Hugging Face folder" in refusal(arguments(model, load=str(empty), **asked))
    check_arguments(arguments(model, load=str(empty)))
    # A job that goes on from its own checkpoints may keep the flag.
    (empty / "latest_checkpointed_iteration.txt").write_text("4")
    check_arguments(arguments(model, load=str(empty), pretrained_checkpoint=str(model), **asked))
    (model / "latest_checkpointed_iteration.txt").write_text("4")
    assert "it holds latest_checkpointed_iteration.txt" in refusal(arguments(model, **asked))


def test_it_is_looked_at_once_megatron_has_validated(model: Path) -> None:
    def validate_args(args: Namespace, defaults: object = None) -> Namespace:
        args.num_layers = 3
        return args

    with pytest.raises(CheckpointError, match="num_layers is 3, not 2"):
        wrap_validate_args(validate_args)(arguments(model))
