"""Test conversions of Megatron checkpoints to the other layer spec without a job: names, refusals, round trips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext import Canonical, Legacy, TorchDist, compare, convert, open_checkpoint, verify
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.under_layer_spec import unbuildable, under_layer_spec
from mcore_ckpt_ext.model_space.layer_spec import names_under_spec
from tests.harness.checkpoints import everything_in, fixture_named
from tests.harness.jobs import differing

LAYER = "decoder.layers.1."
DENSE = ["mlp.linear_fc1.weight", "self_attention.linear_qkv.layer_norm_weight", "self_attention.q_layernorm.weight"]
EXPERTS = ["mlp.router.weight", "mlp.experts.experts.0.linear_fc1.weight", "input_layernorm.bias"]
PLAIN_QUERIES = ["self_attention.linear_kv_up_proj.weight", "input_layernorm.weight"]
LATENT = [*PLAIN_QUERIES, "self_attention.linear_q_up_proj.weight"]
FUSED, SEPARATE = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
OF_LATENT = (
    ("self_attention.linear_q_up_proj.layer_norm_bias", "self_attention.q_layernorm.bias"),
    ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
)


@pytest.mark.parametrize("prefix", [LAYER, "mtp.layers.0.transformer_layer."])
@pytest.mark.parametrize(
    ("others", "norms"),  # under Transformer Engine's spec, under the local one
    [
        (DENSE, [(FUSED, FUSED)]),
        (EXPERTS, [(SEPARATE, FUSED)]),
        (LATENT, [(FUSED, SEPARATE), *OF_LATENT]),
        ([*LATENT, *EXPERTS], [(SEPARATE, SEPARATE), *OF_LATENT]),
    ],
)
def test_norms_under_either_spec(prefix: str, others: list[str], norms: list[tuple[str, str]]) -> None:
    specs = [[prefix + name for name in (*of_spec, *others)] for of_spec in zip(*norms, strict=True)]
    for names in specs:
        for engine in (True, False):
            assert list(names_under_spec(names, engine).values()) == specs[not engine]


def test_layers_of_different_kinds_in_one_model() -> None:
    names = [f"decoder.layers.0.{FUSED}", f"decoder.layers.1.{SEPARATE}", f"{LAYER}mlp.router.weight", "output_layer.w"]
    changed = {old: new for old, new in names_under_spec(names, engine=False).items() if old != new}
    assert changed == {f"decoder.layers.1.{SEPARATE}": f"decoder.layers.1.{FUSED}"}


@pytest.mark.parametrize(
    "name", ["mixer.in_proj.layer_norm_weight", "mixer.D", "self_attention.linear_q_proj.layer_norm_weight"]
)
def test_layers_that_only_one_spec_has(name: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=rf"are unknown; found: {LAYER}{name}.*--transformer-impl"):
        names_under_spec([LAYER + name], engine=False)


def test_a_norm_of_queries_that_are_not_compressed() -> None:
    with pytest.raises(UnsupportedCheckpointError, match=f"found: {LAYER}self_attention.q_layernorm.weight"):
        names_under_spec([LAYER + name for name in (*PLAIN_QUERIES, "self_attention.q_layernorm.weight")], engine=True)


def test_a_model_that_0_19_does_not_build_of_the_other_layers() -> None:
    plain = ["self_attention.linear_q_proj.weight", "self_attention.kv_layernorm.weight", *PLAIN_QUERIES]
    names = names_under_spec([LAYER + name for name in plain], engine=True).values()
    assert "linear_q_proj" in (unbuildable(names, (0, 19)) or "")
    assert unbuildable(names, (0, 18)) is None


def test_a_third_layer_spec() -> None:
    source = open_checkpoint(fixture_named("p21").run)
    other = source.job.arguments().replace(transformer_impl="inference_optimized")
    source = replace(source, job=replace(source.job, arguments=lambda: other))
    with pytest.raises(UnsupportedCheckpointError, match="other layer specs.*found: inference_optimized"):
        under_layer_spec(source, "local")


LOCAL, ENGINE = "local", "transformer_engine"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fixture", "spec", "target"),
    [
        ("p02", LOCAL, Legacy),  # flat buffers
        ("p08b", LOCAL, TorchDist),  # legacy files
        ("p09", LOCAL, Legacy),  # experts
        ("p41", LOCAL, Legacy),  # an optimizer that is not distributed
        ("p47", LOCAL, TorchDist),  # masters that are derived
        ("p21", ENGINE, Canonical),
        ("p22", ENGINE, TorchDist),
        ("p22", ENGINE, Canonical),
    ],
)
def test_there_and_back(fixture: str, spec: Any, target: Any, tmp_path: Path) -> None:
    source, other = fixture_named(fixture), ENGINE if spec == LOCAL else LOCAL
    there = convert(source.run, tmp_path / "there", target(transformer_impl=other))
    assert open_checkpoint(there.destination).job.arguments().transformer_impl == other
    assert compare(source.run, there.destination).equal
    assert verify(there.destination).sound
    back = convert(there.destination, tmp_path / "back", TorchDist(transformer_impl=spec))
    assert back.proven_elements
    found = everything_in(open_checkpoint(back.destination))
    truth = {name: source.truth[name] for name in found}
    assert differing(truth, found) == []
    assert found.keys() >= {name for name in source.truth if "remainder" not in name}


def test_notes_on_a_change_of_layer_spec(tmp_path: Path) -> None:
    engine = convert(fixture_named("p09").run, tmp_path / "engine", TorchDist(transformer_impl="transformer_engine"))
    assert any("norms have other names" in note for note in engine.notes)
    assert any(note.endswith("does not have: empty, as in a fresh model") for note in engine.notes)
    local = convert(fixture_named("p22").run, tmp_path / "local", TorchDist(transformer_impl="local"))
    assert "the local spec has experts one by one: without --moe-grouped-gemm" in local.notes
    assert not open_checkpoint(local.destination).job.arguments().moe_grouped_gemm
