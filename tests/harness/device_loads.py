"""Loads of every format into every kind of optimizer by one rank, to test simulated and real devices."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER
from tests.harness.cases import Case
from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import differing, with_vocabulary
from tests.harness.layouts import VOCABULARY

FAST = {"MCORE_CKPT_EXT_LOAD": "fast"}
LEGACY = {"ckpt_format": "torch"}
TWO_LAYERS = {"num_layers": 2}
UNTIED = {"untie_embeddings_and_output_weights": True}
GATED = {"swiglu": True, "ffn_hidden_size": 64}
LLAMA = {
    **GATED, **UNTIED, "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False,
    "add_qkv_bias": False, "group_query_attention": True, "num_query_groups": 2,
}  # fmt: skip
EXPERTS = {
    **LLAMA, "group_query_attention": False, "num_query_groups": None, "num_experts": 4, "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall", "moe_ffn_hidden_size": 64,
}  # fmt: skip
UNDISTRIBUTED = {"use_distributed_optimizer": False}
FP32 = {"bf16": False, "params_dtype": torch.float32}
AWARE = {"use_precision_aware_optimizer": True}
HALVES = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
OFFLOAD = {**AWARE, "optimizer_cpu_offload": True}

# Name: fixture, arguments of the model and its optimizer beyond the tiny GPT's, arguments to load with.
LOADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dp_reshardable": ("p10", {}, {}),
    "dp_reshardable of torch's AdamW": ("p12", TWO_LAYERS, {}),
    "fully_reshardable": ("p04", {}, {}),
    "fully_sharded_model_space": ("p05", {}, {}),
    "dp_zero_gather_scatter": ("p06", {}, {}),
    "fully_sharded_bucket_space": ("p07", {"max_position_embeddings": 35}, {}),
    "legacy": ("p08", {"padded_vocab_size": 256}, LEGACY),
    "legacy without distributed optimizer": ("p08c", TWO_LAYERS, LEGACY),
    "experts": ("p09", EXPERTS, {}),
    "zarr, bucket space": ("p31", TWO_LAYERS | UNTIED | GATED, {}),
    "zarr, gathered": ("p32", TWO_LAYERS | UNTIED, {}),
    "zarr, model space": ("p33", TWO_LAYERS | GATED, {}),
    "whole parameters, by Megatron's rules": ("p41", UNDISTRIBUTED, {}),
    "fp32": ("p42", LLAMA | UNDISTRIBUTED | FP32, {}),
    "into whole parameters": ("p10", UNDISTRIBUTED, {}),
    "Muon": ("p43", LLAMA | UNDISTRIBUTED | {"optimizer": "muon"}, {}),
    "layer-wise Muon": ("p44", {"optimizer": "dist_muon"} | UNDISTRIBUTED, {}),
    "offload of all": ("p45", OFFLOAD | {"optimizer_offload_fraction": 1.0}, {}),
    "offload of half": ("p46", LLAMA | OFFLOAD | {"optimizer_offload_fraction": 0.5}, {}),
    "remainders": ("p47", AWARE, {}),
    "remainders as fully_reshardable": ("p47b", AWARE, {}),
    "moments in bf16": ("p48", LLAMA | AWARE | HALVES, {}),
    "fsdp_dtensor": ("p50", {}, {}),
    "torch_dcp": ("p51", TWO_LAYERS | UNTIED, {}),
}
# Loaded by Megatron's own rules, read by this package.
BY_STOCK = {
    "fully_reshardable", "whole parameters, by Megatron's rules", "fp32", "Muon", "layer-wise Muon",
}  # fmt: skip


def cases(folder: Path, environment: dict[str, str], names: Collection[str] = tuple(LOADS)) -> list[Case]:
    """Return the loads with these names, each with a dump of its name in a folder."""
    return [
        Case(name, fixture_named(fixture).run, arguments, environment, model, folder / name)
        for name, (fixture, model, arguments) in LOADS.items()
        if name in names
    ]


def assert_is_the_truth(fixture: str, dump: Path) -> None:
    # Masters are dumped whole; the fixture's state also has their remainders.
    written = {key: value for key, value in fixture_named(fixture).truth.items() if PARAM_REMAINDER not in key}
    assert differing(*(with_vocabulary(one, VOCABULARY) for one in (written, assemble(dump)))) == []
