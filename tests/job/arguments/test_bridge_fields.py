"""Tests that arguments with a field in Megatron-Bridge's configuration are written and read back.

The fields are those of the classes in the source of Megatron Core and of Megatron-Bridge's newest release.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext.families.bridge import model_fields
from mcore_ckpt_ext.families.forward_pass import unknown
from mcore_ckpt_ext.job.arguments.row import NOTHING, SHAPES, Alias
from mcore_ckpt_ext.job.arguments.table import BRIDGE_FIELDS, ROWS
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.loops.bridge import job_arguments
from mcore_ckpt_ext.job.model_arguments import complete
from tests.harness.packages import installed_beside

BRIDGE = os.environ.get("BRIDGE_VERSION", "0.6.2")
CORE_FILES = ("transformer/transformer_config.py", "model_parallel_config.py")
BASE_PROVIDERS = ("gpt_provider.py", "mla_provider.py")
# Fields that only the provider of one family reads; the family itself writes them (`Family.bridge_fields`).
OF_A_FAMILY = {
    "heterogeneous_layers_config_encoded_json", "hybrid_attention_ratio", "hybrid_layer_pattern", "hybrid_mlp_ratio",
    "hybrid_override_pattern", "is_hybrid_model", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads",
    "mamba_state_dim",
}  # fmt: skip
# Families of Megatron-Bridge that are not supported.
OF_NO_FAMILY = {
    "head_wise_attn_gate", "relative_attention_max_distance", "relative_attention_num_buckets", "rotary_base_per_layer",
}  # fmt: skip
WRITTEN_OTHERWISE = {"activation_func", "gated_linear_unit", "max_position_embeddings"}
SIZES = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64, "num_experts": 4,
    "max_position_embeddings": 64, "mtp_num_layers": 1, "moe_shared_expert_intermediate_size": 16,
    "window_size": [3, 0], "use_rope_scaling": True, "group_query_attention": True, "num_query_groups": 2,
}  # fmt: skip
VALUES: dict[str, Any] = {
    "window_size": [7, 0], "window_attn_skip_freq": 2, "no_rope_freq": 2, "moe_layer_freq": [0, 1, 1, 1],
    "linear_attention_freq": 2, "moe_router_load_balancing_type": "seq_aux_loss", "mrope_section": [2, 1, 1],
    "mtp_hybrid_override_pattern": "*E", "position_embedding_type": "rope", "num_query_groups": 1,
}  # fmt: skip


def fields_of(paths: Iterable[Path]) -> set[str]:
    """Return the annotated fields of all classes in source files."""
    classes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())))
    bodies = (node.body for node in classes if isinstance(node, ast.ClassDef))
    found = (node for body in bodies for node in body if isinstance(node, ast.AnnAssign))
    return {node.target.id for node in found if isinstance(node.target, ast.Name)}


def core_fields() -> set[str]:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    return fields_of(Path(spec.origin).parent / name for name in CORE_FILES)


def arguments_in(fields: set[str]) -> set[str]:
    """Return the arguments that change or shape a model and have a field: of their own name, or of another."""
    renamed = {argument for name, argument, field in BRIDGE_FIELDS if field.section == "model" and name in fields}
    of_model = {name for name, row in ROWS.items() if row.effect is not NOTHING and not isinstance(row.effect, Alias)}
    return of_model & (renamed | fields)


def changed(argument: str) -> Any:
    """Return a value of an argument that is not neutral."""
    row = ROWS[argument]
    if argument in VALUES:
        return VALUES[argument]
    if isinstance(row.values.default, bool):
        return not row.values.default
    candidates: tuple[Any, ...] = (8, 0.5, "other", True)
    return next(one for one in candidates if row.values.kind.accepts(one) and one != SIZES.get(argument))


def comes_back(argument: str) -> bool:
    """Return whether an argument is in the written fields, under one of the conditions for them, and read from them."""
    conditions = [field.only_with for _, name, field in BRIDGE_FIELDS if name == argument and field.is_written]
    for condition in conditions:
        needed = {} if condition is None else {condition.argument: SIZES.get(condition.argument, condition.value)}
        value = needed.get(argument, changed(argument))
        job = {"position_embedding_type": "rope", **SIZES, **needed, argument: value}
        model = model_fields(complete(JobArguments.of(job, source="test")))
        if job_arguments({"model": model}, "test").raw.get(argument) != value:
            return False
    return bool(conditions)


def lost(fields: set[str]) -> set[str]:
    expected = arguments_in(fields) - OF_A_FAMILY - OF_NO_FAMILY - WRITTEN_OTHERWISE
    return {argument for argument in expected if not comes_back(argument)}


def test_every_argument_with_a_field_of_core_comes_back() -> None:
    fields = core_fields()
    assert "moe_latent_size" in arguments_in(fields)
    assert lost(fields) == set()


@pytest.mark.thorough
def test_every_argument_with_a_field_of_a_provider_comes_back() -> None:
    models = installed_beside("megatron-bridge", BRIDGE, "--only-binary=:all:") / "megatron" / "bridge" / "models"
    providers = fields_of(models.rglob("*provider*.py"))
    assert {"vocab_size", "rotary_base"} <= fields_of(models / name for name in BASE_PROVIDERS)
    assert lost(providers) == set()
    assert providers >= OF_NO_FAMILY


def test_neutral_values_are_left_to_the_class() -> None:
    """Releases of Megatron-Bridge without a field still read models that do not need it."""
    written = model_fields(
        complete(JobArguments.of({**SIZES, "moe_latent_size": None, "use_mup": False}, source="test"))
    )
    assert not {"moe_latent_size", "use_mup", "softmax_scale"} & written.keys()
    assert {name for name, row in ROWS.items() if row.effect is SHAPES} & written.keys()


@pytest.mark.parametrize("fields", [
    {"position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 32.0, "yarn_mscale": 1.0},
    {
        "_target_": "megatron.bridge.models.gemma.gemma2_provider.Gemma2ModelProvider", "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 224,
    },
    {
        "_target_": "megatron.bridge.models.gemma.gemma3_provider.Gemma3ModelProvider", "rotary_base": [10000, 1000000],
        "interleaved_attn_pattern": [5, 1], "window_size": 512,
    },
], ids=lambda fields: next(reversed(fields)))  # fmt: skip
def test_fields_that_are_read_are_no_unknown_arguments(fields: dict[str, Any]) -> None:
    """They are read under other names; the same fields of another provider are still reported."""
    sizes = {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "rotary_base": 10000,
        "position_embedding_type": "rope", "gated_linear_unit": False,
        "activation_func": {"_target_": "torch.nn.functional.gelu", "_call_": False},
    }  # fmt: skip
    assert unknown(complete(job_arguments({"model": {**sizes, **fields}}, "test"))) == []
    of_another = {**sizes, "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider"}
    (line,) = unknown(complete(job_arguments({"model": {**of_another, "attn_logit_softcapping": 50.0}}, "test")))
    assert line.endswith("attn_logit_softcapping 50.0")
