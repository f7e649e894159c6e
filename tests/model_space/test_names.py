"""Test parsing and formatting of parameter names in all their spellings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.families.adapters import adapters_of
from mcore_ckpt_ext.families.family import HuggingFaceTensor
from mcore_ckpt_ext.model_space.adapters import is_adapter, rank_ordered_adapters, to_bridge_name
from mcore_ckpt_ext.model_space.anatomy import (
    is_in_vocabulary,
    is_language_block,
    language_prefix,
    pipelined_block,
    second_names,
)
from mcore_ckpt_ext.model_space.gpt_in_hybrid import names_in_gpt
from mcore_ckpt_ext.model_space.names import (
    LayerSpec,
    ParameterName,
    layer_name,
    name_at,
    name_in,
    own_name,
    parse,
    parse_own,
    part_names,
    split_layer,
    split_parameters,
    stacked_axes,
    under_spec,
)
from mcore_ckpt_ext.model_space.slices import Region

DENSE = st.sampled_from(
    ["self_attention.linear_qkv.weight", "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc2.bias",
     "mlp.linear_fc1.layer_norm_bias", "mlp.shared_experts.linear_fc1.weight", "mlp.router.expert_bias",
     "pre_mlp_layernorm.weight"]
)  # fmt: skip
OF_EXPERTS = st.sampled_from(["linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias"])
NUMBERS = st.integers(0, 300)
BLOCKS = (
    "decoder", "encoder", "language_model.decoder", "thinker.language_model.decoder", "vision_model.decoder",
    "modality_submodules.images.encoders.clip.decoder",
)  # fmt: skip
NAMES = st.one_of(
    st.builds(ParameterName, st.sampled_from(BLOCKS), NUMBERS, st.none(), st.none(), DENSE),
    st.builds(ParameterName, st.sampled_from(BLOCKS), NUMBERS, st.just("mlp.experts"), NUMBERS, OF_EXPERTS),
    st.builds(
        ParameterName, st.none(), st.none(), st.none(), st.none(),
        st.sampled_from(["embedding.word_embeddings.weight", "decoder.final_layernorm.bias", "output_layer.weight",
                         "mtp.layers.0.eh_proj.weight"]),
    ),
)  # fmt: skip


VERSIONS = st.sampled_from([(0, 18), (0, 19)])


@given(NAMES)
def test_parsing_and_formatting_round_trip(name: ParameterName) -> None:
    assert parse(str(name)) == name
    layer, suffix = split_layer(str(name))
    assert layer == (None if name.layer is None else (name.block, name.layer))
    assert str(name) == (suffix if layer is None else layer_name(layer, suffix))


@given(NAMES, st.booleans())
def test_a_sharded_key_gives_the_name_back(name: ParameterName, stack_layers: bool) -> None:
    key, index = name.sharded_key(stack_layers)
    assert stacked_axes(key) == len(index)
    assert name_at(key, index) == str(name)


@given(NAMES, st.sampled_from(LayerSpec), st.booleans(), st.integers(0, 20), st.integers(0, 20), VERSIONS)
def test_a_rank_s_own_name_gives_the_name_back(
    name: ParameterName, spec: LayerSpec, grouped: bool, layers: int, experts: int, version: tuple[int, int]
) -> None:
    is_mapped = name.block is not None and is_language_block(name.block)
    if spec is LayerSpec.LOCAL and "_layernorm." in name.rest and is_mapped:
        return  # of that spec's own names there is no such key
    own = own_name(name, spec, grouped, version)
    assert parse_own(f"module.module.{own}", spec) == name
    moved = name.counted_from(layers, experts)
    assert parse_own(own, spec).counted_from(layers, experts) == moved
    assert moved.counted_from(-layers, -experts) == name
    assert moved.layer == (name.layer + layers if name.layer is not None and is_mapped else name.layer)


@pytest.mark.parametrize(
    ("spec", "grouped", "own"),
    [
        (LayerSpec.LOCAL, False, "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.bias"),
        (LayerSpec.TRANSFORMER_ENGINE, True, "decoder.layers.3.mlp.experts.linear_fc1.bias5"),
    ],
)
def test_experts_under_a_rank_s_own_names(spec: LayerSpec, grouped: bool, own: str) -> None:
    name = "decoder.layers.3.mlp.experts.experts.5.linear_fc1.bias"
    assert own_name(parse(name), spec, grouped, (0, 19)) == own
    assert str(parse_own(own, spec)) == name


@pytest.mark.parametrize("layer", ["mtp_model_layer", "transformer_layer"], ids=["0.19", "0.16"])
def test_a_layer_for_multi_token_prediction_under_a_rank_s_own_names(layer: str) -> None:
    """Legacy files have these names, and every other format that of 0.16 (multi_token_prediction.py)."""
    own, stored = f"module.mtp.layers.0.{layer}.", "mtp.layers.0.transformer_layer."
    names = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_proj.weight": "self_attention.linear_proj.weight",
        "mlp.experts.local_experts.1.linear_fc1.weight": "mlp.experts.experts.1.linear_fc1.weight",
    }
    for name, key in names.items():
        assert str(parse_own(own + name, LayerSpec.LOCAL)) == stored + key
    assert str(parse_own("mtp.layers.0.eh_proj.weight", LayerSpec.LOCAL)) == "mtp.layers.0.eh_proj.weight"


def test_grouped_experts_have_one_extra_state() -> None:
    name = parse("decoder.layers.3.mlp.experts.experts.5.linear_fc1._extra_state")
    assert (
        own_name(name, LayerSpec.TRANSFORMER_ENGINE, True, (0, 19))
        == "decoder.layers.3.mlp.experts.linear_fc1._extra_state"
    )


@pytest.mark.parametrize(
    ("engine", "spec", "name"),
    [
        ("decoder.layers.1.pre_mlp_layernorm.weight", LayerSpec.LOCAL,
         "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"),
        ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", LayerSpec.LOCAL_LATENT,
         "decoder.layers.1.pre_mlp_layernorm.weight"),
        ("decoder.layers.1.self_attention.linear_kv_up_proj.layer_norm_weight", LayerSpec.LOCAL_LATENT,
         "decoder.layers.1.self_attention.kv_layernorm.weight"),
        ("decoder.layers.1.pre_mlp_layernorm.weight", LayerSpec.TRANSFORMER_ENGINE,
         "decoder.layers.1.pre_mlp_layernorm.weight"),
    ],
)  # fmt: skip
def test_names_under_the_other_layer_spec(engine: str, spec: LayerSpec, name: str) -> None:
    assert under_spec(engine, spec) == name


def test_parts_of_a_mixer_follow_each_other_in_the_order_of_memory() -> None:
    weight = "decoder.layers.0.mixer.in_proj.weight"
    names = [f"{weight}.{part}" for part in ("B", "dt", "z", "x", "C")]
    assert split_parameters([*names, "decoder.layers.0.mixer.D"]) == {
        f"{weight}.z": [f"{weight}.{part}" for part in ("z", "x", "B", "C", "dt")]
    }


def test_parts_of_a_gated_delta_net_follow_each_other_in_the_order_of_memory() -> None:
    weight, conv = (f"decoder.layers.0.self_attention.{name}.weight" for name in ("in_proj", "conv1d"))
    projected, filtered = ("query", "key", "value", "z", "beta", "alpha"), ("query", "key", "value")
    names = [*(f"{weight}.{part}" for part in sorted(projected)), *(f"{conv}.{part}" for part in sorted(filtered))]
    assert split_parameters([*names, "decoder.layers.0.self_attention.in_proj.layer_norm_weight"]) == {
        f"{weight}.query": [f"{weight}.{part}" for part in projected],
        f"{conv}.query": [f"{conv}.{part}" for part in filtered],
    }


def test_parts_of_a_gated_delta_product_follow_each_other_in_the_order_of_memory() -> None:
    """`_get_in_proj_checkpoint_split_layout` (ssm/gated_delta_product.py) with 11 Householder updates."""
    weight, conv = (f"decoder.layers.0.mixer.{name}.weight" for name in ("in_proj", "conv1d"))
    values, keys, rates = ([f"{part}{number}" for number in range(11)] for part in "VKb")
    projected, filtered = ["z", *values, *keys, "Q", *rates, "a"], [*values, *keys, "Q"]
    names = [*(f"{weight}.{part}" for part in sorted(projected)), *(f"{conv}.{part}" for part in sorted(filtered))]
    assert split_parameters([*names, "decoder.layers.0.mixer.dt_bias"]) == {
        f"{weight}.z": [f"{weight}.{part}" for part in projected],
        f"{conv}.V0": [f"{conv}.{part}" for part in filtered],
    }


@pytest.mark.parametrize(
    ("fused", "separate"),
    [
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_weight", "decoder.layers.3.pre_mlp_layernorm.weight"),
        ("decoder.layers.self_attention.linear_qkv.layer_norm_bias", "decoder.layers.input_layernorm.bias"),
        ("decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight",
         "decoder.layers.0.self_attention.q_layernorm.weight"),
        ("optimizer.state.exp_avg.decoder.layers.self_attention.linear_kv_up_proj.layer_norm_weight",
         "optimizer.state.exp_avg.decoder.layers.self_attention.kv_layernorm.weight"),
    ],
)  # fmt: skip
def test_norms_have_the_name_that_the_checkpoint_has(fused: str, separate: str) -> None:
    for one, other in ((fused, separate), (separate, fused)):
        assert name_in({one}, other) == one
        assert name_in({one, other}, other) == other
        assert name_in({}, other) == other


LLAVA = ["language_model.decoder.layers.0.mlp.linear_fc1.weight", "vision_model.decoder.layers.0.mlp.linear_fc1.weight"]


@pytest.mark.parametrize(
    ("names", "block"),
    [
        (["embedding.word_embeddings.weight", "decoder.layers.1.mlp.linear_fc1.weight"], "decoder"),
        (["encoder.layers.1.mlp.linear_fc1.weight", "pooler.dense.weight"], "encoder"),
        (LLAVA, "language_model.decoder"),
        ([f"thinker.{name}" for name in LLAVA], "thinker.language_model.decoder"),
        (["encoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1.weight"], None),
        (["vision_model.decoder.layers.0.mlp.linear_fc1.weight"], None),
        (["embedding.word_embeddings.weight"], None),
    ],
    ids=["GPT", "BERT", "LLaVA", "deeper", "T5", "a tower alone", "no layers"],
)
def test_the_block_that_a_pipeline_divides(names: list[str], block: str | None) -> None:
    assert pipelined_block(names) == block


def test_the_rows_of_a_vocabulary() -> None:
    tables = [
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "output_layer.bias",
        "lm_head.output_layer.bias",
    ]
    assert all(is_in_vocabulary(prefix + name) for name in tables for prefix in ("", "language_model."))
    assert not any(map(is_in_vocabulary, ["pooler.dense.weight", "vision_model.position_embeddings.weight", *LLAVA]))
    assert [language_prefix(name) for name in LLAVA] == ["language_model.", ""]


def test_parameters_that_t5_registers_twice() -> None:
    names = ["lm_head.output_layer.bias", "output_layer.bias", "embedding.position_embeddings.weight"]
    assert second_names(names) == {"lm_head.output_layer.bias": "output_layer.bias"}


def test_a_hybrid_model_s_names_in_a_gpt() -> None:
    names = ["decoder.layers.1.self_attention.linear_qkv.weight", "decoder.layers.5.mlp.linear_fc1.weight",
             "decoder.layers.3.mixer.D", "decoder.final_norm.weight", "output_layer.weight"]  # fmt: skip
    assert list(names_in_gpt("M*-M|*-", 2, names).values()) == [
        "decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.1.mlp.linear_fc1.weight",
        None, "decoder.final_layernorm.weight", "output_layer.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("pattern", ["M*-M*", "*-*E", "G-", "*-/*-", "MM", "*-*-*-"])
def test_patterns_that_no_gpt_of_two_layers_can_be_taken_for(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="pattern"):
        names_in_gpt(pattern, 2, [])


@pytest.mark.parametrize("gated", [True, False])
def test_adapters_that_are_ordered_by_the_tensor_parallel_size(gated: bool) -> None:
    linear = "decoder.layers.0.mlp.linear_fc1.adapter"
    always = [f"{linear}.adapter_gate.linear_out.weight", f"{linear}.adapter_up.linear_out.weight"]
    never = [f"{linear}.linear_in.weight", f"{linear}.adapter_up.linear_in.weight",
             "decoder.layers.0.self_attention.linear_qkv.adapter.weight_magnitude"]  # fmt: skip
    whole, magnitude = f"{linear}.linear_out.weight", f"{linear}.weight_magnitude"
    assert rank_ordered_adapters([*always, *never, whole, magnitude], gated) == [*always, magnitude if gated else whole]


def test_adapters_of_ms_swift() -> None:
    linear = "decoder.layers.0.mlp.linear_fc1"
    names = [f"{linear}.lora_A.default.weight", f"{linear}.lora_B.default.weight", f"{linear}.weight"]
    assert [is_adapter(name) for name in names] == [True, True, False]
    assert [to_bridge_name(name) for name in names] == [
        f"{linear}.adapter.linear_in.weight", f"{linear}.adapter.linear_out.weight", f"{linear}.weight",
    ]  # fmt: skip
    assert rank_ordered_adapters(names, gated=True) == names[1:2]
    assert rank_ordered_adapters(names, gated=False) == []


@pytest.mark.parametrize(
    "linear",
    ["mlp.router", "mlp.experts.experts.0.linear_fc1", "mlp.experts.linear_fc1", "mlp.experts.experts.linear_fc2"],
)
def test_adapters_of_routers_and_experts_have_no_place(linear: str) -> None:
    modules = ["mlp.router", "mlp.experts.experts.0.linear_fc1", "mlp.shared_experts.linear_fc1"]
    base = [
        HuggingFaceTensor(f"{name}.weight", (8, 4), (Region.whole(f"decoder.layers.0.{name}.weight", (8, 4)),))
        for name in modules
    ]
    shapes = {"linear_in.weight": (2, 4), "linear_out.weight": (8, 2)}
    one, shared = (
        {f"decoder.layers.0.{name}.adapter.{end}": size for end, size in shapes.items()}
        for name in (linear, modules[-1])
    )
    assert [found.rank for found in adapters_of(base, shared, 1).linears] == [2]
    with pytest.raises(CheckpointError, match=f"these adapters have no known form in PEFT.*{linear}"):
        adapters_of(base, shared | one, 1)


@pytest.mark.parametrize(
    ("name", "version", "own"),
    [
        ("mixer.conv1d.weight.x", (0, 18), "mixer.conv1d.weight"),
        ("mixer.conv1d.weight.x", (0, 19), "mixer.conv1d_weight"),
        ("mixer.in_proj.weight.dt", (0, 19), "mixer.in_proj.weight"),
        ("self_attention.conv1d.weight.query", (0, 19), "self_attention.conv1d.weight"),
    ],
)
def test_parts_are_one_parameter_of_a_rank(name: str, version: tuple[int, int], own: str) -> None:
    spec = LayerSpec.TRANSFORMER_ENGINE
    found = own_name(parse(f"decoder.layers.1.{name}"), spec, False, version)
    assert found == f"decoder.layers.1.{own}"
    whole = str(parse_own(found, spec))
    assert f"decoder.layers.1.{name}" in part_names(whole)
