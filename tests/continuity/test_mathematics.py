"""Test which arguments compute something else under another layout."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_ckpt_ext.continuity.dependencies import BY_CHANCE, DEPENDENCIES
from mcore_ckpt_ext.continuity.mathematics import (
    SAME_TRAINING,
    comparison_of_jobs,
    differences_of_jobs,
    is_same_training,
    sentence_of,
)
from mcore_ckpt_ext.job.arguments.table import ROWS
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.versions import NEWEST, Version

_BASE: dict[str, Any] = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "data_parallel_size": 4, "world_size": 4, "micro_batch_size": 1, "global_batch_size": 16, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "sequence_parallel": False, "padded_vocab_size": 128,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_aux_loss_coeff": 0.01}
_DP2, _MICRO = {"data_parallel_size": 2, "world_size": 2}, {"micro_batch_size": 2}
_TP2 = {"tensor_model_parallel_size": 2, "data_parallel_size": 2, "sequence_parallel": True}
_CP2, _PP2 = {"context_parallel_size": 2, "data_parallel_size": 2}, {"pipeline_model_parallel_size": 2,
                                                                   "data_parallel_size": 2}  # fmt: skip
_LAYOUTS = {"DP": _DP2, "micro batch": _MICRO, "TP": _TP2, "CP": _CP2, "PP": _PP2}


_INTERPOLATED: dict[str, Any] = {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 8}


@pytest.mark.parametrize(
    ("written", "running", "said"),
    [
        ((0, 16), (0, 19), "applies it since 0.19, and the job that saved the checkpoint trained without: leave it"),
        ((0, 19), (0, 18), "ignores it before 0.19, and the job that saved the checkpoint had it applied: resume"),
        (None, (0, 19), "applies it since 0.19"),
        ((0, 16), (0, 18), ""),
        ((0, 19), (0, 19), ""),
    ],
)
def test_a_flag_that_only_some_releases_apply(
    written: tuple[int, int] | None, running: tuple[int, int], said: str
) -> None:
    version = Version(*running)
    job = JobArguments.of({**_BASE, **_INTERPOLATED}, version=Version(*written) if written else None)
    line = comparison_of_jobs(job, job, version)
    expected = f"not the same training: --rotary-seq-len-interpolation-factor: Megatron {said}"
    assert line.startswith(expected) if said else line == ""
    unaffected = {"rotary_seq_len_interpolation_factor": None}, {"hybrid_layer_pattern": "M*"}
    for other in (*unaffected, {"position_embedding_type": "learned_absolute"}):
        assert comparison_of_jobs(job.replace(**other), job.replace(**other), version) == ""


def _changing(feature: dict[str, Any], version: Version = NEWEST) -> set[str]:
    job = JobArguments.of({**_BASE, **feature})
    return {
        name
        for name, layout in _LAYOUTS.items()
        if not is_same_training(differences_of_jobs(job, job.replace(**layout), version))
    }


@pytest.mark.parametrize(
    ("feature", "changing"),
    [
        ({}, set()),
        (_EXPERTS, {"micro batch"}),
        ({**_EXPERTS, "moe_router_load_balancing_type": "seq_aux_loss"}, set()),
        ({**_EXPERTS, "moe_aux_loss_coeff": 0.0}, set()),
        ({**_EXPERTS, "moe_router_load_balancing_type": "global_aux_loss"}, {"DP", "micro batch", "TP", "CP", "PP"}),
        ({**_EXPERTS, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0, 1]},
         set()),
        ({**_EXPERTS, "moe_aux_loss_coeff": 0.0, "moe_expert_capacity_factor": 1.0}, {"micro batch", "TP", "CP"}),
        ({**_EXPERTS, "moe_router_load_balancing_type": "sinkhorn"}, {"micro batch", "TP", "CP"}),
        ({**_EXPERTS, "moe_router_load_balancing_type": "quantile_balancing", "moe_aux_loss_coeff": 0.0},
         {"micro batch"}),
        ({"eod_mask_loss": True}, {"micro batch", "CP"}),
        ({"eod_mask_loss": True, "calculate_per_token_loss": True}, set()),
        ({"sft": True, "calculate_per_token_loss": True}, {"CP"}),
        ({"fim_data": True}, set()),
        ({"mtp_num_layers": 1}, {"CP"}),
        ({"mtp_num_layers": 1, "calculate_per_token_loss": True}, {"CP"}),
        ({"mtp_num_layers": 1, "calculate_per_token_loss": True, "eod_mask_loss": True}, {"micro batch", "CP"}),
        ({"optimizer": "muon", "muon_tp_mode": "blockwise"}, {"TP"}),
        ({"optimizer": "muon", "muon_tp_mode": "duplicated"}, set()),
        ({"softmax_type": "learnable"}, {"TP"}),
        ({"softmax_type": "learnable", "clip_grad": 0.0}, set()),
        ({"experimental_attention_variant": "gated_delta_net"}, set()),
        ({"fp8": "hybrid"}, set(_LAYOUTS)),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, set()),
        ({"hidden_dropout": 0.1}, set()),
    ],
)  # fmt: skip
def test_what_changes_where(feature: dict[str, Any], changing: set[str]) -> None:
    assert _changing(feature) == changing


def test_a_global_balancing_loss_depends_on_the_ranks_even_with_as_many_micro_batches() -> None:
    feature = {"moe_router_load_balancing_type": "global_aux_loss"}
    job = JobArguments.of({**_BASE, **_EXPERTS, **feature})
    (difference,) = differences_of_jobs(job, job.replace(**_DP2, **_MICRO), NEWEST)
    assert difference.dimensions == ("data parallel size",)


def test_defects_are_those_of_their_releases() -> None:
    balance = {**_EXPERTS, "calculate_per_token_loss": True, "moe_router_load_balancing_type": "seq_aux_loss"}
    assert _changing(balance, Version(0, 18)) == {"TP", "CP", "micro batch"}
    assert _changing(balance, Version(0, 15)) == {"TP", "CP"}
    assert _changing(balance, Version(0, 19)) == set()
    assert _changing({"eod_mask_loss": True}, Version(0, 12)) == {"micro batch"}
    predicting = {"mtp_num_layers": 1, "calculate_per_token_loss": True, "eod_mask_loss": True}
    assert _changing(predicting, Version(0, 16)) == set()


@pytest.mark.parametrize(("expert", "expert_tensor", "minor"), [(1, 1, 18), (1, 2, 18), (2, 1, 18), (1, 1, 19)])
def test_experts_that_are_divided_otherwise_without_expert_parallelism(
    expert: int, expert_tensor: int, minor: int
) -> None:
    """Up to 0.18.2 their gradients are reduced like those of other tensors: genuine losses drift apart."""
    job = JobArguments.of({**_BASE, **_EXPERTS})
    layout = {"expert_model_parallel_size": expert, "expert_tensor_parallel_size": expert_tensor}
    found = differences_of_jobs(job, job.replace(**_TP2, **layout), Version(0, minor))
    assert [one.kind for one in found] == ["defect"] * ((expert, expert_tensor, minor) == (1, 1, 18))


@pytest.mark.parametrize(
    "feature",
    [
        {"experimental_attention_variant": "gated_delta_net"},
        {"experimental_attention_variant": "gdn2"},
        {"hybrid_layer_pattern": "G*G-"},
    ],
)
def test_norms_of_delta_nets_depend_on_tensor_parallelism_without_sequence_parallelism(feature: dict[str, Any]) -> None:
    job = JobArguments.of({**_BASE, **feature})
    (found,) = differences_of_jobs(job, job.replace(**{**_TP2, "sequence_parallel": False}), NEWEST)
    assert "output norm" in found.effect


def test_the_sentence() -> None:
    job = JobArguments.of({**_BASE, **_EXPERTS})
    assert sentence_of(differences_of_jobs(job, job.replace(**_DP2), NEWEST)) == SAME_TRAINING
    other = sentence_of(differences_of_jobs(job, job.replace(**_MICRO), NEWEST))
    assert other.startswith("not the same training: --moe-router-load-balancing-type aux_loss: experts are balanced")
    dropped = job.replace(hidden_dropout=0.1)
    found = differences_of_jobs(dropped, dropped.replace(**_DP2), NEWEST)
    assert [one.kind for one in found] == [BY_CHANCE]
    assert sentence_of(found) == f"{SAME_TRAINING} and dropout, which draws other elements"
    grown = differences_of_jobs(job, job.replace(global_batch_size=32, padded_vocab_size=256), NEWEST)
    assert {"another --global-batch-size", "another padding of the vocabulary"} <= {one.feature for one in grown}


def test_every_row_has_a_source_and_dimensions() -> None:
    for row in DEPENDENCIES:
        assert row.dimensions, row
        assert row.source.split(",")[0].startswith(("megatron/", "pretrain_gpt.py")), row
    assert {"micro_batch_size", "padded_vocab_size"} <= set(ROWS)
