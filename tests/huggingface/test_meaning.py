"""Tests that each argument and key has no effect, is expressed, or is refused, and that none is ignored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig, AutoModelForCausalLM

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError
from mcore_ckpt_ext.families.config_keys import OF_THE_FILE, accept_keys, neutral_keys
from mcore_ckpt_ext.families.contradictions import unwritten
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.families.flags import arguments_without_flag, training_flags
from mcore_ckpt_ext.families.forward_pass import ALIASES, NEUTRAL, NOTED, ONLY_WITH, SIZES, notes_on, unknown
from mcore_ckpt_ext.families.recognition import FAMILIES, family_named, family_of_config
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from mcore_ckpt_ext.job.arguments.row import Without
from mcore_ckpt_ext.job.arguments.run import HYBRID_SPECS
from mcore_ckpt_ext.job.arguments.without_effect import arguments_without_effect
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.loops.transformer import model_arguments
from mcore_ckpt_ext.job.model_arguments import ModelArguments, complete
from mcore_ckpt_ext.settings import ACCEPT_KEYS
from tests.harness.damage import without_digests
from tests.harness.huggingface import CONFIGS, MISTAKES, VOCABULARY, make
from tests.harness.published import PUBLISHED

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def family_of(name: str) -> Family:
    return next(family for family in FAMILIES if family.model_type == CONFIGS[name]().model_type)


def configuration(name: str, **changes: Any) -> dict[str, Any]:
    return {**CONFIGS[name]().to_dict(), **changes}


def arguments_of(name: str, **changes: Any) -> ModelArguments:
    """Return the arguments of a job that trains the model, with some changes."""
    arguments = family_of(name).arguments(configuration(name))
    return complete(JobArguments.of({**arguments.as_dict(), **changes}))


def test_every_argument_has_one_class() -> None:
    dependent = [name for names in ONLY_WITH.values() for name in names]
    classes = [*SIZES, *ALIASES, *NEUTRAL, *NOTED, *set(dependent)]
    assert len(classes) == len(set(classes))
    assert not arguments_without_effect(classes)
    conditions = [one.arguments if isinstance(one, Without) else (one.argument,) for one in ONLY_WITH]
    assert {name for names in conditions for name in names} <= {*classes}


def test_fields_of_bridges_providers_are_no_unknown_arguments() -> None:
    """Folders for Megatron-Bridge have fields for a padded vocabulary and for vision-language models."""
    bridge = {"should_pad_vocab": True, "image_token_id": 151655, "video_token_id": 151656}
    name = next(iter(CONFIGS))
    assert unknown(arguments_of(name, **bridge)) == []
    (line,) = unknown(arguments_of(name, **bridge, embedding_multiplier=2.0))
    assert line.endswith("embedding_multiplier 2.0")


def test_arguments_of_the_development_head_are_known() -> None:
    """Each unused argument of the development head has a row, or is listed as without effect."""
    head = {"mhc_num_residual_streams": 4, "batch_invariant_backend": "te_native", "moe_dispatch_fwd_dtype": "bf16"}
    assert unknown(arguments_of("llama", **head, mtp_hsm=True, logit_dtype="fp32", otel_service_name="one")) == []


@pytest.mark.parametrize("spec", HYBRID_SPECS)
def test_megatrons_own_spec_is_no_module_of_the_job(spec: list[str]) -> None:
    assert notes_on(arguments_of("mamba2", spec=spec)) == []
    (line,) = notes_on(arguments_of("mamba2", spec=["my_layers", spec[1]]))
    assert "its own module, whose computation is unknown" in line


@pytest.mark.parametrize("name", ["arcee", "nemotron", "nemotron_h", "mamba2"])
def test_squared_activations_have_no_fusion(name: str) -> None:
    """Without biases Megatron sets `bias_gelu_fusion` to False itself (`validate_args`, arguments.py, 0.19.2)."""
    arguments = arguments_of(name)
    assert arguments.add_bias_linear is False
    assert arguments.bias_gelu_fusion is False
    assert family_of(name).mismatches(arguments) == []


@pytest.mark.parametrize("name", CONFIGS)
def test_no_family_passes_over_an_argument(name: str) -> None:
    """Every argument with an effect that differs from its neutral value is mapped by a setting, or reported."""
    family, arguments = family_of(name), arguments_of(name)
    assert family.mismatches(arguments) == []
    expressed = SIZES.union(*(setting.expresses for setting in family.settings))
    for argument, neutral in NEUTRAL.items():
        if argument not in expressed:
            other = "other" if neutral is None or isinstance(neutral, str) else not neutral
            with_it = complete(JobArguments.of({**arguments.as_dict(), argument: _valued(argument, other)}))
            assert any(reason.startswith(f"{argument} is ") for reason in family.mismatches(with_it)), argument


def _valued(argument: str, other: Any) -> Any:
    """Return a valid value of an argument that is not neutral."""
    kinds: dict[str, Any] = {
        "window_size": (3, 0), "window_attn_skip_freq": 2, "no_rope_freq": 2, "num_experts": 4, "softmax_scale": 0.5,
        "attention_softcap": 30.0, "final_logit_softcap": 30.0, "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0, "rotary_base_local": 10000.0,
    }  # fmt: skip
    return kinds.get(argument, other)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"use_mup": True, "mup_width_mult": 2.0}, "use_mup"),
        ("llama", {"enable_mhc_connections": True}, "enable_mhc_connections"),
        ("llama", {"activation_func_clamp_value": 7.0}, "activation_func_clamp_value"),
        ("llama", {"glu_linear_offset": 1.0}, "glu_linear_offset"),
        ("qwen3_moe", {"moe_mlp_glu_interleave_size": 32}, "moe_mlp_glu_interleave_size"),
        ("qwen3_moe", {"moe_router_load_balancing_type": ["sinkhorn"]}, "moe_router_load_balancing_type"),
        ("qwen3_moe", {"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input"),
        ("qwen3_moe", {"moe_router_score_function": "sigmoid"}, "moe_router_score_function"),
        ("gpt2", {"softmax_type": "learnable"}, "softmax_type"),
        ("mixtral", {"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor"),
        ("deepseek_v3", {"moe_latent_size": 8}, "moe_latent_size"),
        ("gpt_oss", {"bias_gelu_fusion": True, "moe_grouped_gemm": False}, "bias_gelu_fusion"),
        ("gpt_oss", {"glu_linear_offset": 0.0}, "glu_linear_offset"),
        ("gpt_oss", {"activation_func_clamp_value": None}, "activation_func_clamp_value"),
        # The local layer spec lets tokens attend to later ones, and the meaning of -1 depends on the spec.
        ("mistral", {"window_size": (8, 8)}, "window_size"),
        ("gpt_oss", {"window_size": (-1, 0)}, "window_size"),
        # transformers only scales positions of whole heads.
        ("glm4_moe", {"use_rope_scaling": True}, "rotary_percent"),
        ("phi3", {"position_embedding_type": "yarn"}, "position_embedding_type"),
        ("phi3", {"use_rope_scaling": True}, "use_rope_scaling"),
        # transformers ranks groups of experts by their best two, Megatron by the number of experts chosen per group.
        ("deepseek_v3", {"moe_router_topk": 2}, "moe_router_topk"),
        ("deepseek_v2", {"moe_router_topk": 4}, "moe_router_group_topk"),  # in DeepSeek-V2, by their best one
        ("glm4_moe", {"moe_router_num_groups": 4, "moe_router_group_topk": 4}, "moe_router_num_groups"),
    ],
)
def test_arguments_without_a_key_in_the_family_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    reasons = family_of(name).mismatches(arguments_of(name, **changes))
    assert [reason for reason in reasons if reason.startswith(f"{message} ")], reasons


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # They have no effect without experts or with sigmoid scores.
        ("llama", {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True}),
        ("deepseek_v3", {"moe_router_pre_softmax": True}),
        ("qwen3_moe", {"moe_router_load_balancing_type": ["seq_aux_loss"], "moe_router_dtype": "fp32"}),
        ("llama", {"window_attn_skip_freq": 2}),
        ("mixtral", {"moe_layer_freq": [1, 1]}),
        ("llama", {"mup_base_hidden_size": 8, "mamba_state_dim": 64, "fp8": "hybrid", "hidden_dropout": 0.5}),
    ],
)
def test_arguments_without_effect_are_accepted(name: str, changes: dict[str, Any]) -> None:
    assert family_of(name).mismatches(arguments_of(name, **changes)) == []


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        # Defaults of the class: another scaling, and a window.
        ("gpt_oss", {"position_embedding_type": "rope"}, {"rope_parameters": {"rope_type": "default"}}),
        ("gpt_oss", {"window_size": None}, {"sliding_window": 128, "layer_types": ["full_attention"] * 2}),
        ("phi3", {"kv_channels": 12}, {"head_dim": 12}),
        ("starcoder2", {"kv_channels": 12}, {"head_dim": 12}),
        ("qwen3_moe", {"moe_aux_loss_coeff": [0.01, 0.02]}, {"router_aux_loss_coef": 0.01}),
        ("mixtral", {"position_embedding_type": "yarn"}, {"head_dim": 8}),
    ],
)
def test_values_that_transformers_would_misread_are_reported(
    name: str, changes: dict[str, Any], said: dict[str, Any]
) -> None:
    """Each configuration was another model than the job's, or one that transformers does not load."""
    family, arguments = family_of(name), arguments_of(name, **changes)
    assert family.mismatches(arguments) == unwritten(family, arguments) == []
    found = AutoConfig.for_model(**family.config(arguments)).to_dict()
    if "rope_parameters" in said:
        said = {**said, "rope_parameters": {**said["rope_parameters"], "rope_theta": 150000.0}}
    assert {key: found[key] for key in said} == said


def test_the_epsilon_of_inner_norms_is_reported() -> None:
    """In transformers, `rms_norm_eps` does not affect the norms of compressed queries, keys and values."""
    family = family_of("deepseek_v3")
    assert family.notices(arguments_of("deepseek_v3")) == []
    (message,) = family.notices(arguments_of("deepseek_v3", layernorm_epsilon=1e-5))
    assert "1e-06" in message and "1e-05" in message


def test_a_single_expert_is_not_normalized() -> None:
    """Megatron only normalizes the weights of several experts (`topk_routing_with_score_function`)."""
    family = family_of("deepseek_v3")
    assert family.config(arguments_of("deepseek_v3"))["norm_topk_prob"] is True
    assert family.config(arguments_of("deepseek_v3", moe_router_topk=1))["norm_topk_prob"] is False
    with pytest.raises(UnsupportedCheckpointError, match="norm_topk_prob"):
        family.arguments(configuration("deepseek_v3", num_experts_per_tok=1))


def test_a_key_that_is_not_known_is_refused(tmp_path: Path, models: dict[str, Path]) -> None:
    family = family_of("llama")
    with pytest.raises(UnsupportedCheckpointError, match="attention_chunk_size: 3.*--accept-key attention_chunk_size"):
        family.arguments(configuration("llama", attention_chunk_size=3))
    family.arguments(configuration("llama", query_multiplier=None, unsloth_version="2026.1", temperature=0.6))
    finetuned = configuration("llama", rope_parameters={**YARN, "finetuned": True})  # Yarn-Llama-2
    assert family.arguments(finetuned) == family.arguments(configuration("llama", rope_parameters=YARN))
    with pytest.raises(UnsupportedCheckpointError, match="wavelength"):
        family.arguments(configuration("llama", rope_parameters={**YARN, "wavelength": 1}))
    for key in ("use_sliding_window", "use_mrope"):
        with pytest.raises(UnsupportedCheckpointError, match=key):
            changed = {key: True, "sliding_window": 4, "layer_types": None, "max_window_layers": 1}
            family_of("qwen2").arguments(configuration("qwen2", **changed))
    with pytest.raises(UnsupportedCheckpointError, match="layer_types"):
        kinds = ["sliding_attention", "full_attention"]
        family_of("qwen3").arguments(configuration("qwen3", layer_types=kinds))


def test_contradictory_values_are_refused() -> None:
    parts = {"partial_rotary_factor": 0.25, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}
    with pytest.raises(UnsupportedCheckpointError, match="0.25, and 0.5 among rope_parameters"):
        family_of("qwen3_next").arguments(configuration("qwen3_next", **parts))
    for width in (0, None):
        with pytest.raises(UnsupportedCheckpointError, match=f"no window; found: sliding_window: {width}"):
            family_of("gpt_oss").arguments(configuration("gpt_oss", sliding_window=width))
    everywhere = ["full_attention"] * 2
    family_of("gpt_oss").arguments(configuration("gpt_oss", sliding_window=None, layer_types=everywhere))


LINEAR, PLAIN = ({"rope_type": kind, "factor": 2.0, "rope_theta": 1e4} for kind in ("linear", "default"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps: null"),
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta: null; expected: a value, or no such key"),
        (
            {"rope_theta": 5e5, "rope_parameters": PLAIN},
            "rope_theta; found: 500000.0, and 10000.0 among rope_parameters",
        ),
        ({"rope_scaling": LINEAR, "rope_parameters": PLAIN}, "linear.*, and .*default.* in rope_parameters"),
    ],
    ids=str,
)
def test_keys_that_transformers_would_choose_between_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=message):
        family_of("llama").arguments(configuration("llama", **keys))


def test_equal_duplicate_keys_are_read() -> None:
    old = {"type": "linear", "factor": 2.0, "rope_type": "linear"}
    once = family_of("llama").arguments(configuration("llama", rope_parameters=LINEAR))
    twice = configuration("llama", rope_parameters=LINEAR, rope_scaling=old, rope_theta=1e4)
    assert family_of("llama").arguments(twice) == once


def test_a_class_of_another_family_is_refused() -> None:
    for classes in (["LlamaForCausalLM"], ["LlamaForSequenceClassification"], None):
        assert family_of_config({"model_type": "llama", "architectures": classes}, "here").name == "Llama"
    with pytest.raises(UnsupportedCheckpointError, match="two model families.*Qwen2ForCausalLM"):
        family_of_config({"model_type": "llama", "architectures": ["Qwen2ForCausalLM"]}, "here")


def test_layers_for_multi_token_prediction_that_are_not_read_are_named() -> None:
    """They follow those of the decoder; other unknown layers are none of them."""
    config = configuration("deepseek_v3", num_nextn_predict_layers=2)
    last = config["num_hidden_layers"] - 1
    names = [f"model.layers.{layer}.mlp.gate.other" for layer in range(last, last + 4)]
    for read, left in ((None, names[1:3]), (1, names[2:3])):
        arguments = arguments_of("deepseek_v3", mtp_num_layers=read)
        assert family_of("deepseek_v3").unmapped_tensors(names, arguments, config) == {*left}


def test_the_gate_behind_a_gated_delta_net() -> None:
    """Published folders of Qwen3.5 have the key; transformers always uses SiLU, which is also called swish."""
    for kind in ("swish", "silu", None):
        family_of("qwen3_5").arguments(configuration("qwen3_5", output_gate_type=kind))
    with pytest.raises(UnsupportedCheckpointError, match="output_gate_type"):
        family_of("qwen3_5").arguments(configuration("qwen3_5", output_gate_type="sigmoid"))


# Equivalent keys: `type` of old releases, and keys with default values.
IN_OTHER_WORDS = {
    "SmolLM3 3B": {"layer_types"}, "Phi-3-mini 4k": {"attention_bias"}, "AFM 4.5B": {"rope_scaling"},
    "Seed-OSS 36B": {"rope_scaling"}, "Qwen3-Next 80B-A3B": {"full_attention_interval"},
    "Qwen3.5 397B-A17B": {
        "full_attention_interval", "mlp_only_layers", "mtp_use_dedicated_embeddings", "rope_parameters",
    },
    "gpt-oss-20b": {"rope_scaling"},
    "GLM-5": {"head_dim", "qk_head_dim", "rope_parameters"},
    "InternLM3 8B": {"bias", "qkv_bias"},
    "Gemma 3 27B": {"rope_local_base_freq", "rope_scaling", "rope_theta", "sliding_window_pattern"},
    "MiniMax-M2": {"shared_intermediate_size"},
}  # fmt: skip
SAME_POSITIONS = {"DeepSeek-V2", "DeepSeek-V2-Lite", "DeepSeek-V3", "Kimi-K2", "DeepSeek-V3.2"}


# Megatron ranks its groups of experts differently.
ACCEPTED_KEYS = {"DeepSeek-V2": ["topk_method"]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read_and_come_back(name: str) -> None:
    config = PUBLISHED[name]
    family = family_named(config["model_type"])
    with accept_keys(ACCEPTED_KEYS.get(name, [])):
        arguments = family.arguments(config)
        assert family.mismatches(arguments) == []
        back = {**family.copied_keys(config), **family.config(arguments)}
        assert family.arguments(back) == arguments
    of_the_file = {key: config[key] for key in OF_THE_FILE if key in config}
    differing = {key for key in config if key not in of_the_file and back.get(key) != config[key]}
    if name in SAME_POSITIONS:
        differing.remove("rope_scaling")
        old, new = config["rope_scaling"], back["rope_scaling"]
        assert new == {**{key: value for key, value in old.items() if key != "type"}, "rope_type": old["type"]}
    assert differing == IN_OTHER_WORDS.get(name, set())


def test_windows_by_an_older_key() -> None:
    """Keys of transformers 4.50; the choice of windowed layers changed more than half of the logits."""
    config = {key: value for key, value in configuration("gemma3").items() if key != "layer_types"}
    family = family_of("gemma3")
    assert family.arguments({**config, "sliding_window_pattern": 2}).window_attn_skip_freq == 2
    assert family.arguments(config).window_attn_skip_freq == 6
    with pytest.raises(UnsupportedCheckpointError, match="sliding_window_pattern"):
        family.arguments({**config, "sliding_window_pattern": 0})


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("glm_moe_dsa", {"index_topk_pattern": "FSFF", "indexer_types": None}, "indexer_types.*found: FSFF"),
        ("glm_moe_dsa", {"index_topk_pattern": "FS", "indexer_types": None}, "index_topk_pattern"),
        ("deepseek_v3", {"head_dim": 2}, "head_dim"),
        ("deepseek_v3", {"routed_scaling_factor": 0.0}, "routed_scaling_factor; found: 0.0"),
        ("stablelm", {"qk_layernorm": True}, "each head of queries and keys has a norm of its own"),
        ("stablelm", {"use_parallel_residual": True}, "read the same input"),
        # The class treats this type as LongRoPE.
        ("phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "found: yarn, which"),
    ],
)
def test_keys_with_features_that_megatron_lacks(name: str, changed: dict[str, Any], said: str) -> None:
    config = configuration(name)
    family_of(name).arguments({**config, "index_topk_pattern": "FF"} if "indexer_types" in changed else config)
    with pytest.raises(UnsupportedCheckpointError, match=said):
        family_of(name).arguments({**config, **changed})


def test_sizes_that_released_folders_leave_out() -> None:
    """Gemma 3 4B omits sizes, which are defaults of the class."""
    values = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"model_type": "gemma3_text", **values}
    found, expected = (family_of("gemma3").arguments(one) for one in (config, AutoConfig.for_model(**config).to_dict()))
    assert found == expected


@pytest.mark.parametrize(
    ("function", "gated", "found"),
    [
        ("torch.nn.functional.gelu", False, {"bias_gelu_fusion": False}),
        ("megatron.core.activations.fast_gelu", False, {"bias_gelu_fusion": True}),
        ("torch.nn.functional.relu", False, {"activation_func": "torch.nn.functional.relu"}),
        ("torch.nn.functional.silu", False, {"activation_func": "torch.nn.functional.silu"}),
        ("torch.nn.functional.silu", True, {"swiglu": True, "bias_gelu_fusion": True}),
    ],
)
def test_activations_of_other_loops(function: str, gated: bool, found: dict[str, Any]) -> None:
    """An activation without a flag cannot be expressed by a `config.json` either."""
    values = model_arguments({"activation_func": {"_target_": function}, "gated_linear_unit": gated})
    assert {name: value for name, value in values.items() if value} == {
        name: value for name, value in found.items() if value
    }
    arguments = arguments_of("gpt2")
    changed = replace(arguments, job=arguments.job.replace(**values))
    assert bool(family_of("gpt2").mismatches(changed)) == ("activation_func" in values)


def test_an_unknown_rotary_base() -> None:
    """Descriptions of other training loops may omit arguments, so Megatron's default is not assumed."""
    job = arguments_of("llama").job
    values = {name: value for name, value in job.raw.items() if name != "rotary_base"}
    with pytest.raises(UnsupportedCheckpointError, match="--argument rotary_base"):
        complete(JobArguments.of(values, is_complete=False))


@pytest.mark.parametrize("flag", ["export_qk_l2_norm", "export_moe_apply_probs_on_input"])
def test_flags_of_modelopt_that_count(flag: str) -> None:
    arguments = arguments_of("llama")
    changed = replace(arguments, job=arguments.job.replace(**{flag: True}))
    assert any(flag in mismatch_reason for mismatch_reason in family_of("llama").mismatches(changed))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_missing_key_has_the_default_of_transformers(name: str) -> None:
    """Without any one key, the arguments are those of the transformers class for a missing key."""
    family, whole = family_of(name), configuration(name)
    for key in set(whole) - {"model_type", "rope_parameters", "num_hidden_layers"}:
        less = {other: value for other, value in whole.items() if other != key}
        try:
            by_class = AutoConfig.for_model(**less).to_dict()
        except (StrictDataclassClassValidationError, ZeroDivisionError):
            # The default contradicts the other keys: there is no such model. Exaone4Config divides by the pattern of
            # windows, 0 without windows, where `layer_types` is missing.
            continue
        found, expected = (_read(family, one) for one in (less, {**less, key: by_class.get(key)}))
        assert found in (expected, None), (key, by_class.get(key))


def _read(family: Family, config: dict[str, Any]) -> ModelArguments | None:
    """Return the arguments; None if the configuration is refused."""
    try:
        return family.arguments(config)
    except UnsupportedCheckpointError:
        return None


@pytest.mark.parametrize(
    "scaling",
    [
        {}, {"beta_fast": 4, "beta_slow": 2}, {"mscale": 0.707, "mscale_all_dim": 0.5}, {"mscale": 0.707},
        {"mscale_all_dim": 0.707}, {"attention_factor": 1.25}, {"truncate": False},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_yarn_comes_back_as_the_same_positions(name: str, scaling: dict[str, Any]) -> None:
    """Inverse frequencies, factor of cosine and sine, and scale of logits are computed by transformers from both."""
    family = family_of(name)
    config = configuration(name, rope_parameters={**YARN, **scaling})
    if name == "deepseek_v3" and "truncate" in scaling:
        with pytest.raises(UnsupportedCheckpointError, match="truncates"):
            family.arguments(config)
        return
    back = {**config, **family.config(family.arguments(config))}
    del back["rope_parameters"]
    found, expected = (_positions(one) for one in (back, config))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def _positions(config: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    rotary, attention = model.model.rotary_emb, model.model.layers[0].self_attn
    return rotary.inv_freq, torch.tensor(rotary.attention_scaling), torch.tensor(attention.scaling)


def test_settings_without_a_flag_are_reported(tmp_path: Path) -> None:
    """pretrain_gpt.py would compute other positions, so its flags are not suggested."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "rope_scaling_factor = 32.0": ("llama3_tied", {"factor": 32.0}),
        "beta_fast = 1": ("deepseek_v3", {"beta_fast": 1}),
        "original_max_position_embeddings = 64": ("deepseek_v3", {"original_max_position_embeddings": 64}),
        "rotary_base = 10000.5": ("deepseek_v3", {"rope_theta": 10000.5}),
    }
    for feature, (name, changes) in cases.items():
        folder = tmp_path / feature.partition(" ")[0]
        make(name, folder)
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"] |= changes
        (folder / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(folder)
        assert isinstance(checkpoint.format.reader, HuggingFaceCheckpoint)
        notices = " ".join(checkpoint.format.notices(checkpoint))
        assert (
            f"pretrain_gpt.py cannot train this model: it has no flag for {feature}, or does not pass the flag on"
            in notices
        )
        assert "train it with:" not in notices
    assert not arguments_without_flag(arguments_of("deepseek_v3"), since_0_19=False)


def test_the_flags_of_yarn() -> None:
    arguments = family_of("llama").arguments(configuration("llama", rope_parameters=YARN))
    flags = " ".join(training_flags(arguments))
    assert "--position-embedding-type yarn --" in flags
    assert "--rotary-scaling-factor 4.0 " in flags
    assert "--yarn-original-max-position-embeddings 64" in flags


@pytest.fixture
def job(models: dict[str, Path], tmp_path: Path) -> Path:
    """Return a Llama whose arguments, in JSON, are those of a job of pretrain_gpt.py and can be changed."""
    mcore_ckpt_ext.convert(models["llama"], tmp_path / "job", mcore_ckpt_ext.Canonical())
    return tmp_path / "job"


def state(job: Path, **arguments: Any) -> None:
    """Add arguments to the job, and mark the checkpoint as saved by a job."""
    text = (job / "common.json").read_text().replace('"released": true', '"released": false')
    assert text.count('"swiglu": true') == 1
    added = "".join(f'"{name}": {json.dumps(value)}, ' for name, value in arguments.items())
    for name in arguments:
        text = text.replace(f'"{name}":', f'"{name}_before":')
    (without_digests(job) / "common.json").write_text(text.replace('"swiglu": true', added + '"swiglu": true'))


def test_flags_that_the_job_may_have_ignored(job: Path, tmp_path: Path) -> None:
    state(job, use_checkpoint_args=False, rotary_seq_len_interpolation_factor=2)
    message = "--argument rotary_seq_len_interpolation_factor=2 since 0.19, =null up to 0.18"
    with pytest.raises(UnsupportedCheckpointError, match=message):
        mcore_ckpt_ext.convert(job, tmp_path / "hf", mcore_ckpt_ext.HuggingFace())
    for value, kind in (("null", "default"), ("2", "linear")):
        assignments = [f"rotary_seq_len_interpolation_factor={value}"]
        mcore_ckpt_ext.convert(job, tmp_path / kind, mcore_ckpt_ext.HuggingFace(arguments=assignments))
        config = AutoConfig.from_pretrained(tmp_path / kind)
        assert config.rope_parameters["rope_type"] == kind
    with pytest.raises(UsageError, match="NAME=VALUE"):
        mcore_ckpt_ext.HuggingFace(arguments=["swiglu"])


def test_a_config_that_would_say_another_model_is_refused(job: Path, tmp_path: Path) -> None:
    """The written configuration is read back before anything is converted."""
    state(job, layernorm_epsilon=1e-3)
    with pytest.raises(UnsupportedCheckpointError, match="found: layernorm_epsilon is 0.001, not 1e-06"):
        mcore_ckpt_ext.convert(job, tmp_path / "hf", mcore_ckpt_ext.HuggingFace(), family=f"{MISTAKES}:FixedEpsilon")


def test_the_padding_of_a_class_is_not_taken_over(models: dict[str, Path], tmp_path: Path) -> None:
    """Phi-3's padding token is not in a small vocabulary, so transformers would not load the folder."""
    mcore_ckpt_ext.convert(models["phi3"], tmp_path / "job", mcore_ckpt_ext.Canonical())
    mcore_ckpt_ext.convert(tmp_path / "job", tmp_path / "hf", mcore_ckpt_ext.HuggingFace(vocab_size=VOCABULARY))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").config.pad_token_id is None


def test_llama_3_2_that_the_job_may_have_computed_as_3_1(tmp_path: Path) -> None:
    make("llama3_tied", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["rope_parameters"]["factor"] = 32.0
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    mcore_ckpt_ext.convert(tmp_path / "model", tmp_path / "job", mcore_ckpt_ext.Canonical())
    mcore_ckpt_ext.convert(tmp_path / "job", tmp_path / "back", mcore_ckpt_ext.HuggingFace())
    assert AutoConfig.from_pretrained(tmp_path / "back").rope_parameters["factor"] == 32.0
    state(tmp_path / "job", use_checkpoint_args=False)
    with pytest.raises(UnsupportedCheckpointError, match="--rope-scaling-factor 32"):
        mcore_ckpt_ext.convert(tmp_path / "job", tmp_path / "hf", mcore_ckpt_ext.HuggingFace())


def test_dropped_tokens_are_reported(job: Path, tmp_path: Path) -> None:
    state(job, moe_expert_capacity_factor=1.5)
    report = mcore_ckpt_ext.convert(job, tmp_path / "hf", mcore_ckpt_ext.HuggingFace())
    assert any(note.startswith("--moe-expert-capacity-factor 1.5: the job drops tokens") for note in report.notes)


def test_queries_that_are_not_compressed(models: dict[str, Path], tmp_path: Path) -> None:
    """Megatron 0.19 does not support DeepSeek-V2-Lite and Moonlight."""
    with pytest.raises(UnsupportedCheckpointError, match=r"--megatron-version 0\.18\.0"):
        mcore_ckpt_ext.convert(
            models["deepseek_v2_lite"], tmp_path / "run", mcore_ckpt_ext.TorchDist(megatron_version="0.19.2")
        )


def test_the_width_of_gpt2_is_written_as_it_was_read(models: dict[str, Path], tmp_path: Path) -> None:
    family = family_named("gpt2")
    assert family.config(arguments_of("gpt2"))["n_inner"] is None
    assert family.config(arguments_of("gpt2", ffn_hidden_size=96))["n_inner"] == 96


@pytest.mark.parametrize("width", [0, -1])
def test_a_window_that_shows_nothing_is_refused(width: int) -> None:
    """A window of 0 would mask each token itself; it was formerly read as no window."""
    for name in ("mistral", "gemma2", "gpt_oss", "phi3", "starcoder2"):
        with pytest.raises(UnsupportedCheckpointError, match="sliding_window"):
            family_of(name).arguments(configuration(name, sliding_window=width))


def test_whether_embeddings_are_tied_is_true_or_false() -> None:
    """The string "false" would be true; transformers refuses it, too."""
    with pytest.raises(UnsupportedCheckpointError, match="tie_word_embeddings; found: false; expected: true or false"):
        family_of("llama").arguments(configuration("llama", tie_word_embeddings="false"))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 1}, "with a gate normalized to 1"),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "with a gate normalized to 1"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts"),
        ("smollm3", {"no_rope_layers": [1]}, "an entry for each of 2 layers"),
    ],
)
def test_arguments_with_which_no_job_starts_are_refused(name: str, keys: dict[str, Any], message: str) -> None:
    """Megatron's own configuration refuses it, or transformers raises an index error."""
    with pytest.raises(UnsupportedCheckpointError, match=message):
        family_of(name).arguments(configuration(name, **keys))


def test_entries_that_are_of_no_layer() -> None:
    found = family_of("smollm3").arguments(configuration("smollm3", no_rope_layers=[1, 0, 0]))
    assert found.no_rope_freq == [0, 1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling_parrot.Parrot"}}, "auto_map names code"),
        ({"transformers_version": "9.1.0"}, "config.json is of transformers 9.1.0"),
    ],
)
def test_keys_that_the_class_does_not_read(changed: dict[str, Any], message: str) -> None:
    """They have no effect in transformers, but the folder's own code or a newer release may read them."""
    config = configuration("llama", query_multiplier=3)
    family_of("llama").arguments(config)
    assert neutral_keys(config, "llama").unread >= {"query_multiplier"}
    with pytest.raises(
        UnsupportedCheckpointError, match=f"query_multiplier: 3 .{message}.*--accept-key query_multiplier"
    ):
        family_of("llama").arguments({**config, **changed})
    with accept_keys(["query_multiplier"]):
        family_of("llama").arguments({**config, **changed})


def test_layers_that_differ_are_refused_in_short() -> None:
    """The argument that describes the layers of a large Llama-Nemotron has 100 KB."""
    arguments = arguments_of("llama", heterogeneous_layers_config_encoded_json="{}" * 5000)
    (reason,) = family_of("llama").mismatches(arguments)
    assert reason.startswith("heterogeneous_layers_config_encoded_json is ")
    assert len(reason) < 500


def test_groups_of_experts_that_megatron_ranks_otherwise_need_to_be_accepted() -> None:
    """DeepSeek-V2 uses 6 experts of 3 groups; Megatron ranks a group by its best two, not by its best one."""
    family, config = family_of("deepseek_v2"), configuration("deepseek_v2", num_experts_per_tok=4)
    with pytest.raises(UnsupportedCheckpointError, match="the sum of its best 2.*--accept-key topk_method"):
        family.arguments(config)
    assert family.arguments({**config, "topk_method": "greedy"}).moe_router_num_groups is None
    with accept_keys(["topk_method"]):
        arguments = family.arguments(config)
        assert family.mismatches(arguments) == []
        assert any("may choose other experts" in note for note in family.notices(arguments))
    assert family.mismatches(arguments) != []


def test_keys_that_another_setting_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACCEPT_KEYS.name, "wing_span, attention_chunk_size")
    family_of("llama").arguments(configuration("llama", attention_chunk_size=3))


def test_a_default_of_the_class_is_neutral() -> None:
    """Defaults of the base class are neutral even with `auto_map`, others are not; `false` and 0 differ."""
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_parrot.Parrot"}}
    family_of("deepseek_v3").arguments(configuration("deepseek_v3", add_cross_attention=False, **code))
    with pytest.raises(UnsupportedCheckpointError, match="add_cross_attention"):
        family_of("deepseek_v3").arguments(configuration("deepseek_v3", add_cross_attention=0, **code))


def test_no_key_with_an_effect_is_taken_over_from_another_model() -> None:
    """`--tokenizer FOLDER` may name a model with chunked attention; only keys that its class ignores are copied."""
    arguments = arguments_of("llama").replace(vocab_size=VOCABULARY)
    published = configuration("llama", attention_chunk_size=3, query_multiplier=3)
    found = family_of("llama").updated_config(published, arguments)
    assert found is not None
    assert "attention_chunk_size" not in found
    assert found["query_multiplier"] == 3
