"""Tests the round trip of every family to Megatron: bitwise equal tensors, equivalent configurations."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.recognition import FAMILIES
from mcore_ckpt_ext.formats.target import LAYER_SPECS, LayerSpec
from mcore_ckpt_ext.operations.comparison import compare
from tests.harness.huggingface import (
    CONFIGS,
    add_further_layer,
    assert_same_tensors,
    make,
    tensors,
    torch_dist,
)
from tests.harness.witnesses import BUILT_BY_MEGATRON, COMPUTES_AS, OF_OWN_CODE, SHOWN

# Keys that Megatron cannot express, or that describe the file instead of the model.
NOT_THE_MODEL = {"transformers_version", "_name_or_path"}
# DeepSeek-V3: MTP layers, which transformers does not have.
LOST = dict.fromkeys(
    ("deepseek_v3", "glm4_moe", "glm4_moe_air", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"),
    {"num_nextn_predict_layers", "num_mtp_layers"},
)
# Keys of which an equivalent is written; published DeepSeek models have more keys than transformers reads.
_RELEASED = {"aux_loss_alpha", "moe_layer_freq", "topk_method", "scoring_func"}
_INDEXED = {"rope_interleave", "mlp_bias"}
SAID_OTHERWISE = {
    "minimax_m2": {"use_qk_norm", "use_routing_bias", "qk_norm_type", "scoring_func"},
    "mixtral": {"head_dim"},  # written although it follows from other keys
    "gpt_oss": {"rope_parameters"},  # without the betas, which are equal in all models
    "qwen3_next": {"partial_rotary_factor"},
    "qwen3_5": {"partial_rotary_factor", "mtp_num_hidden_layers", "attn_output_gate"},
    "qwen3_5_moe": {"partial_rotary_factor", "mtp_num_hidden_layers", "attn_output_gate", "norm_topk_prob"},
    "deepseek_v32": {*_RELEASED, *_INDEXED},
    "glm_moe_dsa": {
        *_RELEASED, *_INDEXED, "index_topk_freq", "indexer_rope_interleave", "partial_rotary_factor",
        "rope_parameters",
    },
    "glm4_moe_lite": {*_RELEASED, "first_k_dense_replace", "partial_rotary_factor", "rope_parameters"},
    "internlm3": {"mlp_bias", "architectures"}, "gemma3": {"use_bidirectional_attention"},
    "phi3": {"partial_rotary_factor"}, "phi4_mini": {"partial_rotary_factor"},
    "deepseek_v2": _RELEASED, "deepseek_v2_lite": _RELEASED, "deepseek_v3": _RELEASED,
    "glm4_moe": _RELEASED, "glm4_moe_air": _RELEASED,
}  # fmt: skip


def specs_of(name: str) -> tuple[LayerSpec, ...]:
    """Return the layer specs with which Megatron can build a model."""
    needs_engine = next(one.needs_engine for one in FAMILIES if one.model_type == SHOWN[name].model_type)
    only: tuple[LayerSpec, ...] = ("transformer_engine",)
    return only if needs_engine else LAYER_SPECS


def configuration(folder: Path, name: str) -> dict[str, Any]:
    """Return the configuration as transformers parses it."""
    config = AutoConfig.from_pretrained(folder).to_dict()
    return {key: value for key, value in config.items() if key not in NOT_THE_MODEL | LOST.get(name, set())}


def test_every_family_has_a_model() -> None:
    made = {make().model_type for make in CONFIGS.values()}
    assert {name: make().model_type for name, make in CONFIGS.items()} == {
        name: shown.model_type for name, shown in SHOWN.items()
    }
    # transformers has no class for the others.
    assert {family.model_type for family in FAMILIES} - {
        "kimi_k2",
        "mimo",
        "xverse",
        "bailing_moe",
        *COMPUTES_AS,
        *OF_OWN_CODE,
    } == made


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_compared_or_the_table_says_why_not(family: Family) -> None:
    """The documentation's table has a row for each file of families, with layouts or a reason."""
    file = {other.model_type for other in FAMILIES if type(other).__module__ == type(family).__module__}
    rows = [shown for shown in SHOWN.values() if shown.model_type in file]
    compared = any(shown.layouts + shown.engine for shown in rows) or file & {*COMPUTES_AS, *OF_OWN_CODE}
    assert compared or family.bridge_only_reason or any(shown.why for shown in rows)


@pytest.mark.parametrize(
    ("name", "spec"), [(name, spec) for name in CONFIGS for spec in LAYER_SPECS if spec in specs_of(name)]
)
def test_there_and_back(name: str, spec: LayerSpec, models: dict[str, Path], tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(models[name], tmp_path / "run", torch_dist(name, spec))
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "release"
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert_same_tensors(models[name], tmp_path / "back")
    assert compare(tmp_path / "run", models[name]).equal
    before, after = configuration(models[name], name), configuration(tmp_path / "back", name)
    differing = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert differing <= SAID_OTHERWISE.get(name, set()), {key: (before.get(key), after.get(key)) for key in differing}
    generation = "generation_config.json"
    assert json.loads((tmp_path / "back" / generation).read_text()) == json.loads(
        (models[name] / generation).read_text()
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_it_and_answers_the_same(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(models[name], tmp_path / "run", torch_dist(name))
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        original = AutoModelForCausalLM.from_pretrained(models[name])(tokens).logits
        assert torch.equal(loaded(tokens).logits, original)


ENGINE_ONLY = [name for name in CONFIGS if "local" not in specs_of(name)]


@pytest.mark.parametrize("name", [*BUILT_BY_MEGATRON, "gemma2", *ENGINE_ONLY])
def test_through_the_legacy_files_of_two_tensor_ranks(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Legacy files store parts as one tensor, with the rows of each part of a rank."""
    experts = {"expert_model_parallel_size": 2} if any(sign in name for sign in ("moe", "mixtral", "seek")) else {}
    spec: LayerSpec = "transformer_engine" if name in ENGINE_ONLY else "local"
    target = mcore_ckpt_ext.Legacy(tensor_model_parallel_size=2, transformer_impl=spec, **experts)
    if name == "gpt_oss":
        with pytest.raises(UnsupportedCheckpointError, match="refuses this layout for the model"):
            mcore_ckpt_ext.convert(models[name], tmp_path / "run", target)
        target, experts = replace(target, tensor_model_parallel_size=1, expert_model_parallel_size=4), {"size": 4}
    mcore_ckpt_ext.convert(models[name], tmp_path / "run", target)
    assert len(list((tmp_path / "run" / "release").glob("mp_rank_*"))) == (4 if experts else 2)
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert_same_tensors(models[name], tmp_path / "back")


# Models that Megatron 0.19, for which these files are, does not have.
_NOT_FOR_BRIDGE = {"deepseek_v2_lite"}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in _NOT_FOR_BRIDGE])
def test_round_trip_through_the_format_of_megatron_bridge(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    """`run_config.yaml` is equivalent to `config.json`."""
    mcore_ckpt_ext.convert(models[name], tmp_path / "run", mcore_ckpt_ext.TorchDist(loop="bridge"))
    report = mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert not [note for note in report.notes if note.startswith("unknown arguments")]
    assert_same_tensors(models[name], tmp_path / "back")
    before, after = configuration(models[name], name), configuration(tmp_path / "back", name)
    differing = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert differing <= SAID_OTHERWISE.get(name, set()), {key: (before.get(key), after.get(key)) for key in differing}
    assert (before.get("rope_parameters") or {}).get("factor") == (after.get("rope_parameters") or {}).get("factor")


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_5_moe", "deepseek_v3", "glm4_moe"])
def test_experts_that_are_stored_stacked_are_read(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(models[name])
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert any(label.endswith("experts.gate_up_proj") for label in tensors(tmp_path / "stacked"))
    mcore_ckpt_ext.convert(tmp_path / "stacked", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert_same_tensors(models[name], tmp_path / "back")


@pytest.mark.parametrize(
    ("name", "of"),
    [("kimi_k2", "deepseek_v3"), ("mimo", "qwen2"), ("internlm3", "llama"), ("glm4_moe_lite", "deepseek_v3")],
)
def test_a_family_under_another_name(name: str, of: str, models: dict[str, Path], tmp_path: Path) -> None:
    """The original folder determines the family; without it, the family with the same model is chosen."""
    made = name if name in models else of
    shutil.copytree(models[made], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": name}))
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    (tmp_path / "run" / "release" / "tokenizer" / "config.json").unlink()
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "unsaid", mcore_ckpt_ext.HuggingFace())
    for folder, found in (("back", name), ("unsaid", of)):
        assert json.loads((tmp_path / folder / "config.json").read_text())["model_type"] == found
        assert_same_tensors(models[made], tmp_path / folder)


# Megatron-Bridge's mapping (models/deepseek/common.py and models/glm/glm45_bridge.py, commit 067f987d).
BY_BRIDGE = {
    "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "final_layernorm",
    "self_attn.o_proj": "transformer_layer.self_attention.linear_proj",
    "mlp.gate": "transformer_layer.mlp.router",
    "mlp.experts.3.down_proj": "transformer_layer.mlp.experts.experts.3.linear_fc2",
    "mlp.shared_experts.down_proj": "transformer_layer.mlp.shared_experts.linear_fc2",
}  # fmt: skip


# Megatron-Bridge's mapping of a layer of Gemma 3 (models/gemma/gemma3_bridge.py, the same commit).
GEMMA_BY_BRIDGE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "post_attention_layernorm.weight": "self_attention.linear_proj.post_layernorm.weight",
    "pre_feedforward_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "post_feedforward_layernorm.weight": "mlp.linear_fc2.post_layernorm.weight",
}  # fmt: skip


def test_gemma_3_is_as_megatron_bridge_has_it(models: dict[str, Path], tmp_path: Path) -> None:
    """Names, rows and the provider's fields agree."""
    mcore_ckpt_ext.convert(models["gemma3"], tmp_path / "run", mcore_ckpt_ext.TorchDist())
    checkpoint, stored = mcore_ckpt_ext.open_checkpoint(tmp_path / "run"), tensors(models["gemma3"])
    for theirs, ours in GEMMA_BY_BRIDGE.items():
        found = checkpoint.tensor("weight", f"decoder.layers.5.{ours}").read()
        assert torch.equal(found, stored[f"model.layers.5.{theirs}"]), ours
    gate, up = (stored[f"model.layers.5.mlp.{one}_proj.weight"] for one in ("gate", "up"))
    assert torch.equal(
        checkpoint.tensor("weight", "decoder.layers.5.mlp.linear_fc1.weight").read(), torch.cat([gate, up])
    )
    section = json.loads((tmp_path / "run" / "release" / "run_config.yaml").read_text())["model"]
    assert section["_target_"].endswith("gemma3_provider.Gemma3ModelProvider")
    assert (section["rotary_base"], section["window_size"]) == ([10000, 1000000], 16)
    assert section["rope_scaling_factor"] == 1.0
    assert section["softmax_scale"] == pytest.approx(24**-0.5)


# Megatron-Bridge's mapping of Nemotron-H (models/nemotronh/nemotron_h_bridge.py, the same commit), and the parts into
# which its `MambaInProjMapping` and `MambaConv1dMapping` split rows (models/conversion/param_mapping.py), in their
# order.
NEMOTRON_BY_BRIDGE = {
    "backbone.embeddings.weight": "embedding.word_embeddings.weight",
    "backbone.layers.0.norm.weight": "decoder.layers.0.mixer.in_proj.layer_norm_weight",
    **{f"backbone.layers.3.mixer.{name}": f"decoder.layers.3.mixer.{name}"
       for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")},
    "backbone.layers.1.norm.weight": "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
    "backbone.layers.1.mixer.up_proj.weight": "decoder.layers.1.mlp.linear_fc1.weight",
    "backbone.layers.1.mixer.down_proj.weight": "decoder.layers.1.mlp.linear_fc2.weight",
    "backbone.layers.2.norm.weight": "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
    "backbone.layers.2.mixer.o_proj.weight": "decoder.layers.2.self_attention.linear_proj.weight",
    "backbone.layers.4.norm.weight": "decoder.layers.4.pre_mlp_layernorm.weight",
    "backbone.layers.4.mixer.gate.weight": "decoder.layers.4.mlp.router.weight",
    "backbone.layers.4.mixer.gate.e_score_correction_bias": "decoder.layers.4.mlp.router.expert_bias",
    "backbone.layers.4.mixer.experts.3.up_proj.weight": "decoder.layers.4.mlp.experts.experts.3.linear_fc1.weight",
    "backbone.layers.4.mixer.experts.3.down_proj.weight": "decoder.layers.4.mlp.experts.experts.3.linear_fc2.weight",
    "backbone.layers.4.mixer.shared_experts.up_proj.weight": "decoder.layers.4.mlp.shared_experts.linear_fc1.weight",
    "backbone.layers.4.mixer.shared_experts.down_proj.weight": "decoder.layers.4.mlp.shared_experts.linear_fc2.weight",
    "backbone.norm_f.weight": "decoder.final_norm.weight", "lm_head.weight": "output_layer.weight",
}  # fmt: skip
MIXER_BY_BRIDGE = {"in_proj.weight": "z x B C dt", "conv1d.weight": "x B C", "conv1d.bias": "x B C"}


def test_nemotron_h_is_as_megatron_bridge_has_it(models: dict[str, Path], tmp_path: Path) -> None:
    """Names, rows and the provider's fields agree; a stacked folder of transformers 5 is read, too."""
    mcore_ckpt_ext.convert(models["nemotron_h"], tmp_path / "run", mcore_ckpt_ext.TorchDist())
    checkpoint, stored = mcore_ckpt_ext.open_checkpoint(tmp_path / "run"), tensors(models["nemotron_h"])
    for theirs, ours in NEMOTRON_BY_BRIDGE.items():
        assert torch.equal(checkpoint.tensor("weight", ours).read(), stored[theirs]), ours
    for name, parts in MIXER_BY_BRIDGE.items():
        ours = [f"decoder.layers.3.mixer.{name}.{part}" for part in parts.split()]
        joined = torch.cat([checkpoint.tensor("weight", part).read() for part in ours])
        assert torch.equal(joined, stored[f"backbone.layers.3.mixer.{name}"]), name
    section = json.loads((tmp_path / "run" / "release" / "run_config.yaml").read_text())["model"]
    assert section["_target_"].endswith("mamba_provider.MambaModelProvider")
    assert section["hybrid_override_pattern"] == "M-*ME"
    assert (section["mamba_num_heads"], section["num_moe_experts"]) == (8, 4)
    model = AutoModelForCausalLM.from_pretrained(models["nemotron_h"])
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    renamed = {
        name.replace("model.", "backbone.", 1): tensor.clone() for name, tensor in tensors(tmp_path / "stacked").items()
    }
    assert renamed["backbone.layers.4.mixer.experts.up_proj"].ndim == 3
    save_file(renamed, tmp_path / "stacked" / "model.safetensors")
    assert compare(tmp_path / "run", tmp_path / "stacked").equal


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hybrid_override_pattern": "MM-ME"}, "MM-ME, and M-.ME in layers_block_type"),
        ({"layers_block_type": ["mamba", "conv", "mlp"]}, "hybrid_override_pattern"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"), ({"sliding_window": 512}, "sliding_window"),
        ({"conv_kernel": 3}, "conv_kernel"), ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    ],
)  # fmt: skip
def test_features_that_hybrid_models_of_megatron_lack_are_refused(values: dict[str, Any], message: str) -> None:
    config = {**CONFIGS["nemotron_h"]().to_dict(), **values}
    (family,) = (one for one in FAMILIES if one.model_type == "nemotron_h")
    with pytest.raises(UnsupportedCheckpointError, match=message):
        family.arguments(config)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "spec"),
    [(name, spec) for name in ("deepseek_v3", "glm4_moe", "glm4_moe_air", "deepseek_v32") for spec in specs_of(name)],
)
def test_mtp_layers(name: str, spec: LayerSpec, models: dict[str, Path], tmp_path: Path) -> None:
    """All tensors of MTP layers survive the round trip, with the names of Megatron-Bridge's mapping."""
    shutil.copytree(models[name], tmp_path / "model")
    add_further_layer(tmp_path / "model")
    report = mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", torch_dist(name, spec))
    assert any("--mtp-num-layers 1" in note for note in report.notes)
    names = mcore_ckpt_ext.open_checkpoint(tmp_path / "run").names("weight")
    further = [label for label in names if label.startswith("mtp.")]
    assert {f"mtp.layers.0.{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")} <= {*further}
    assert "mtp.layers.0.transformer_layer.mlp.experts.experts.3.linear_fc2.weight" in further
    checkpoint, stored = mcore_ckpt_ext.open_checkpoint(tmp_path / "run"), tensors(tmp_path / "model")
    for theirs, ours in BY_BRIDGE.items():
        found = checkpoint.tensor("weight", f"mtp.layers.0.{ours}.weight").read()
        assert torch.equal(found, stored[f"model.layers.2.{theirs}.weight"]), ours
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert_same_tensors(tmp_path / "model", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert compare(tmp_path / "run", tmp_path / "model").equal


def test_the_one_layer_that_predicts_a_further_token(models: dict[str, Path], tmp_path: Path) -> None:
    """The Qwen families have one MTP layer, with the names of Megatron-Bridge's mapping (qwen3_next_bridge.py)."""
    shutil.copytree(models["qwen3_next"], tmp_path / "model")
    stored = tensors(tmp_path / "model")
    last, hidden = "model.layers.3.", stored["model.norm.weight"].shape[0]
    layer = {name.replace(last, "mtp.layers.0."): tensor + 1 for name, tensor in stored.items() if last in name}
    norms = {
        f"mtp.{name}.weight": torch.randn(hidden) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    further = {**layer, **norms, "mtp.fc.weight": torch.randn(hidden, 2 * hidden)}
    save_file({**stored, **further}, tmp_path / "model" / "model.safetensors")
    report = mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    assert any("--mtp-num-layers 1" in note for note in report.notes)
    checkpoint = mcore_ckpt_ext.open_checkpoint(tmp_path / "run")
    for theirs, ours in {
        "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "final_layernorm",
        "layers.0.self_attn.o_proj": "transformer_layer.self_attention.linear_proj",
        "layers.0.mlp.shared_expert.down_proj": "transformer_layer.mlp.shared_experts.linear_fc2",
    }.items():  # fmt: skip
        found = checkpoint.tensor("weight", f"mtp.layers.0.{ours}.weight").read()
        assert torch.equal(found, further[f"mtp.{theirs}.weight"]), ours
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert_same_tensors(tmp_path / "model", tmp_path / "back")


# Megatron-Bridge's mapping of MiMo's layers (models/mimo/mimo_bridge.py, the same commit), which also exchanges the
# halves of `input_proj`.
MIMO_BY_BRIDGE = {
    "token_layernorm": "enorm", "hidden_layernorm": "hnorm", "final_layernorm": "final_layernorm",
    "self_attn.o_proj": "transformer_layer.self_attention.linear_proj",
    "mlp.down_proj": "transformer_layer.mlp.linear_fc2",
}  # fmt: skip


@pytest.mark.parametrize("spec", LAYER_SPECS)
def test_the_mtp_layers_of_mimo(spec: LayerSpec, models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["qwen2"], tmp_path / "model")
    config, stored = json.loads((tmp_path / "model" / "config.json").read_text()), tensors(tmp_path / "model")
    said = {**config, "model_type": "mimo", "num_nextn_predict_layers": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(said))
    hidden = stored["model.norm.weight"].shape[0]
    theirs = "model.mtp_layers.0."
    layer = {
        name.replace("model.layers.1.", theirs): tensor + 1 for name, tensor in stored.items() if "layers.1." in name
    }
    norms = {f"{theirs}{name}.weight": torch.randn(hidden) for name in MIMO_BY_BRIDGE if "." not in name}
    projection = torch.randn(hidden, 2 * hidden)
    further = {**layer, **norms, f"{theirs}input_proj.weight": projection}
    save_file({**stored, **further}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    report = mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", torch_dist("mimo", spec))
    assert any("--mtp-num-layers 1" in note for note in report.notes)
    checkpoint = mcore_ckpt_ext.open_checkpoint(tmp_path / "run")
    for one, other in MIMO_BY_BRIDGE.items():
        found = checkpoint.tensor("weight", f"mtp.layers.0.{other}.weight").read()
        assert torch.equal(found, further[f"{theirs}{one}.weight"]), other
    hidden_first = torch.cat(projection.chunk(2, dim=1)[::-1], dim=1)
    assert torch.equal(checkpoint.tensor("weight", "mtp.layers.0.eh_proj.weight").read(), hidden_first)
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert_same_tensors(tmp_path / "model", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert compare(tmp_path / "run", tmp_path / "model").equal


def test_numbers_that_are_stored_less_one_are_rounded_once(tmp_path: Path) -> None:
    """In bf16, numbers below 0.5 lose bits when 1 is subtracted; they return within half a step near 1."""
    make("qwen3_next", tmp_path / "model", torch.bfloat16)
    stored = tensors(tmp_path / "model")
    for name in (name for name in stored if name.endswith("linear_attn.norm.weight")):
        stored[name] = torch.linspace(0.2, 0.4, stored[name].numel()).bfloat16()
    save_file(stored, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    report = mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    assert any("the difference is rounded once" in note for note in report.notes)
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    before, after = tensors(tmp_path / "model"), tensors(tmp_path / "back")
    for name, tensor in before.items():
        if name.endswith("linear_attn.norm.weight"):
            held = mcore_ckpt_ext.open_checkpoint(tmp_path / "run").tensor(
                "weight", f"decoder.layers.{name.split('.')[2]}.self_attention.out_norm.weight"
            )
            assert torch.equal(held.read(), (tensor.float() - 1).bfloat16())
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=2**-9)
        else:
            assert torch.equal(after[name], tensor), name
    differing = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert differing
    # Two folders are compared exactly; for a checkpoint, earlier rounding is reported.
    found = mcore_ckpt_ext.compare(tmp_path / "model", tmp_path / "back")
    assert sum(len(kind.different) for kind in found.kinds) == len(differing)
    beside = mcore_ckpt_ext.compare(tmp_path / "model", tmp_path / "run")
    assert beside.equal
    (fact,) = (fact for fact in beside.facts if fact.what == "rounded before")
    assert (fact.a, fact.b) == ("3 norms, when 1 is subtracted", "nothing")


def test_numbers_of_a_half_and_more_keep_their_bits_when_1_is_subtracted(tmp_path: Path) -> None:
    """The difference of 1 and a number of bfloat16 from 0.5 to 256 is a number of bfloat16."""
    make("qwen3_next", tmp_path / "model", torch.bfloat16)
    stored = tensors(tmp_path / "model")
    norms = sorted(name for name in stored if name.endswith("linear_attn.norm.weight"))
    codes = torch.arange(0x3F00, 0x4380).to(torch.int16).view(torch.bfloat16)  # all numbers from 0.5 to 255
    some = codes[:: len(codes) // sum(stored[name].numel() for name in norms)]
    for name, values in zip(norms, some.split(stored[norms[0]].numel()), strict=False):
        stored[name] = values.clone()
    save_file(stored, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    mcore_ckpt_ext.convert(tmp_path / "run", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert_same_tensors(tmp_path / "model", tmp_path / "back")
    assert torch.equal((codes.float() - 1).bfloat16().float() + 1, codes.float())


def test_more_experts_for_a_token_than_there_are(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["gpt_oss"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["num_experts_per_tok"] = 8
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpointError, match="8 experts for each token, of 4"):
        mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())


def test_mtp_layers_and_models_without_them(models: dict[str, Path], tmp_path: Path) -> None:
    """Legacy files omit MTP layers with a note; a separate embedding is refused; copies may be missing."""
    shutil.copytree(models["deepseek_v3"], tmp_path / "model")
    add_further_layer(tmp_path / "model")
    legacy = mcore_ckpt_ext.Legacy(transformer_impl="local")
    report = mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "legacy", legacy)
    assert any(item.key.startswith("model.layers.2.") for item in report.unread)
    mcore_ckpt_ext.convert(tmp_path / "legacy", tmp_path / "without", mcore_ckpt_ext.HuggingFace())
    assert_same_tensors(models["deepseek_v3"], tmp_path / "without")
    stored = tensors(tmp_path / "model")
    head = stored.pop("model.layers.2.shared_head.head.weight")
    save_file(stored, tmp_path / "model" / "model.safetensors")
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "run", mcore_ckpt_ext.TorchDist())
    head[3, 3] += 1
    save_file({**stored, "model.layers.2.shared_head.head.weight": head}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UnreadableCheckpointError, match="its own weights where Megatron shares those of the model"):
        mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "no", mcore_ckpt_ext.TorchDist())
