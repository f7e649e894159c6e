"""The layout of a job that goes on with another number of GPUs, chosen from arguments alone."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout_choice.elastic import own_layout
from mcore_ckpt_ext.operations.elastic_layout import choose_for, choose_layout, with_virtual_stages
from mcore_ckpt_ext.versions import Version

DENSE: dict[str, Any] = {
    "num_layers": 64, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64, "num_query_groups": 8,
    "group_query_attention": True, "swiglu": True, "vocab_size": 128256, "seq_length": 8192, "bf16": True,
    "untie_embeddings_and_output_weights": True, "use_distributed_optimizer": True, "sequence_parallel": True,
    "position_embedding_type": "rope", "micro_batch_size": 2, "global_batch_size": 1024,
    "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 8,
}  # fmt: skip
EXPERTS = {
    **DENSE, "num_experts": 64, "moe_router_topk": 4, "moe_ffn_hidden_size": 2048, "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1,
}  # fmt: skip
GIB = 1 << 30


@pytest.mark.parametrize(
    ("changes", "gpus", "reason"),
    [
        ({}, 64, "64 of 64 GPUs: TP8 x PP8 x DP1; global batch 1024 kept"),
        ({}, 128, "128 of 128 GPUs: TP8 x PP8 x DP2; global batch 1024 kept"),
        ({}, 56, "56 of 56 GPUs: TP8 x PP7 x DP1 in place of TP8 x PP8 x DP1; global batch 1024 kept"),
        ({}, 127, "127 GPUs"),
        ({"pipeline_model_parallel_size": 2}, 80, "80 of 80 GPUs: TP8 x PP5 x DP2 in place of TP8 x PP2 x DP1;"),
        # Seven data-parallel ranks cannot share 1,024 samples.
        ({"pipeline_model_parallel_size": 1}, 40, "40 of 40 GPUs: TP8 x PP5 x DP1 in place of"),
        # Eight nodes of which one is lost, with few layers: no size other than powers of 2 divides anything.
        ({"num_layers": 4, "pipeline_model_parallel_size": 1}, 56, "32 of 56 GPUs: TP8 x PP1 x DP4; global batch 1024"),
        ({"micro_batch_size": 3, "pipeline_model_parallel_size": 1}, 8, "micro batch 2 in place of 3"),
        ({"global_batch_size": 6, "pipeline_model_parallel_size": 1}, 16, "global batch 6 kept, micro batch 1 in"),
    ],
)
def test_the_choice(changes: dict[str, Any], gpus: int, reason: str) -> None:
    chosen = choose_layout(None, gpus, arguments={**DENSE, **changes}, gpu_memory=100 * GIB)
    assert reason in chosen.reason
    assert chosen.gpus + chosen.waiting == gpus


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_training_stays_the_same_on_every_number_of_gpus(arguments: dict[str, Any]) -> None:
    for gpus in [*range(8, 65, 4), 250]:
        chosen = choose_layout(None, gpus, arguments=arguments, gpus_per_node=8)
        sizes = chosen.sizes
        assert sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"] == chosen.gpus <= gpus
        assert chosen.global_batch_size == 1024
        assert 1024 % (chosen.micro_batch_size * sizes["dp"]) == 0
        assert chosen.gpus % (sizes["etp"] * sizes["ep"] * sizes["pp"]) == 0
        assert 8 % sizes["tp"] == 0
        assert sizes["cp"] == 1
        # With the same divisor x TP, a vocabulary of any size is padded as before.
        divisor = chosen.arguments.get("make_vocab_size_divisible_by", 128)
        assert divisor * sizes["tp"] == 128 * arguments["tensor_model_parallel_size"]


def test_every_step_of_a_ramp_is_kept() -> None:
    arguments = {**DENSE, "num_layers": 4, "pipeline_model_parallel_size": 1, "rampup_batch_size": [96, 32, 10000]}
    ramped = choose_layout(None, 512, arguments=arguments, megatron_version="0.17")
    assert (ramped.sizes["dp"], ramped.micro_batch_size) == (32, 1)
    past = arguments | {"consumed_train_samples": 10000}
    del arguments["rampup_batch_size"]
    plain = choose_layout(None, 512, arguments=arguments)
    assert (plain.sizes["dp"], plain.micro_batch_size) == (64, 2)
    assert choose_layout(None, 512, arguments=past, megatron_version="0.17").sizes == plain.sizes


def test_a_batch_that_may_be_decreased_fits_where_that_of_evaluation_does() -> None:
    """Megatron decreases no batch of evaluation, which is that of training unless it is stated (core_v0.18.0)."""
    job = JobArguments.of({"micro_batch_size": 1, "global_batch_size": 8, "decrease_batch_size_if_needed": True})
    assert own_layout(job, 3, Version(0, 17))[1] is None
    assert "--eval-global-batch-size 8 is not" in (own_layout(job, 3, Version(0, 18))[1] or "")
    assert own_layout(job.replace(eval_global_batch_size=6), 3, Version(0, 18))[1] is None


def test_the_batch_changes_only_if_that_is_allowed_and_uses_more_gpus() -> None:
    arguments = {**DENSE, "num_layers": 4, "pipeline_model_parallel_size": 1}
    kept = choose_layout(None, 56, arguments=arguments)
    assert (kept.gpus, kept.waiting, kept.global_batch_size) == (32, 24, 1024)
    changed = choose_layout(None, 56, arguments=arguments, may_change_batch=True)
    assert (changed.gpus, changed.waiting, changed.global_batch_size) == (56, 0, 1022)
    assert "global batch 1022 in place of 1024" in changed.reason
    assert changed.arguments["override_opt_param_scheduler"] is True
    unchanged = choose_layout(None, 32, arguments=arguments, may_change_batch=True)
    assert unchanged.global_batch_size == 1024


def test_flags_of_a_script_of_its_own_are_no_reason_to_refuse() -> None:
    chosen = choose_for(
        None, 56, arguments={**DENSE, "data_per_class_fraction": 1.0}, gpus_per_node=8, gpu_memory=None,
        version=Version(0, 19), may_change_batch=False,
    )  # fmt: skip
    assert chosen.layout == "TP8 x PP7 x DP1"


def test_without_a_global_batch_size_nothing_can_be_kept() -> None:
    with pytest.raises(UsageError, match="global batch size") as refusal:
        choose_layout(None, 56, arguments={**DENSE, "global_batch_size": None})
    assert "--global-batch-size" in str(refusal.value)


def test_a_gpu_that_is_too_small_is_a_reason_to_refuse() -> None:
    with pytest.raises(UnsupportedCheckpointError) as refusal:
        choose_layout(None, 4, arguments=DENSE, gpu_memory=24 * GIB)
    assert "no layout of 4 GPUs keeps the training of TP8 x PP8" in str(refusal.value)
    assert "a GPU would need" in str(refusal.value)


def test_less_memory_makes_more_gpus_divide_the_model() -> None:
    arguments = {**DENSE, "pipeline_model_parallel_size": 4}
    roomy = choose_layout(None, 24, arguments=arguments, gpu_memory=500 * GIB)
    small = choose_layout(None, 24, arguments=arguments, gpu_memory=120 * GIB)
    assert small.memory.total <= 120 * GIB
    assert small.sizes["tp"] * small.sizes["pp"] >= roomy.sizes["tp"] * roomy.sizes["pp"]


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ({"num_virtual_stages_per_pipeline_rank": 2}, 2),
        ({"num_layers_per_virtual_pipeline_stage": 2}, 4),
        ({"pipeline_model_parallel_layout": "Et*8|(t*8|)*6t*8L"}, None),
        ({"pipeline_model_parallel_layout": "Ettt|(tttt|)*14tttttL"}, 2),
        ({"num_virtual_stages_per_pipeline_rank": 1}, None),
        ({}, None),
    ],
)
def test_virtual_stages_are_those_that_megatron_derives(flags: dict[str, Any], stages: int | None) -> None:
    assert with_virtual_stages({**DENSE, **flags})["virtual_pipeline_model_parallel_size"] == stages
