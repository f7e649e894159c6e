"""The table of arguments that compute something else under another layout.

A job computes the same but for rounding under every layout, except where a loss, a norm, a router or an optimizer works
on a group of ranks or on a micro batch. Each row was read in the sources that it names. The figures are from
`scripts/same_training.py`: relative differences of the loss or the gradient norm of the next two iterations in fp32,
where rounding stays below 2e-7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcore_ckpt_ext.continuity.features import (
    averages_masked,
    balances_by,
    balances_per_token,
    clips_sinks,
    drops_out,
    has_delayed_scaling,
    has_delta_nets,
    has_masks,
    is_muon,
    is_tuned,
    predicts_further,
    routes_by,
)
from mcore_ckpt_ext.continuity.sizes import (
    CONTEXT,
    DATA,
    EXPERT_TENSOR,
    GLOBAL_BATCH,
    MICRO_BATCH,
    MICRO_BATCHES,
    PIPELINE,
    RANK_TOKENS,
    TENSOR,
    VOCABULARY,
)
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import (
    AVERAGES_BY_CONTEXT_RANK,
    SCALES_BALANCE_BY_BATCH,
    SCALES_BALANCE_BY_RANK,
    SEPARATES_DIVIDED_EXPERTS,
    WEIGHS_FURTHER_TOKENS,
)
from mcore_ckpt_ext.versions import Version

BY_DESIGN = "by design"
DEFECT = "defect"
BY_CHANCE = "by chance"
_ROUTER = "megatron/core/transformer/moe/router.py"
_FURTHER_TOKENS = "megatron/core/transformer/multi_token_prediction.py, `process_mtp_loss`; until 0.16 gpt_model.py"
_BALANCES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True)
class Difference:
    """A part of the training that is not the same under another layout.

    Attributes:
        feature: the arguments that bring it, in words of a user.
        dimensions: the dimensions that change, and on which it depends.
        effect: how it differs.
        kind: `by design`, `by chance`, or a `defect` of these releases.
        source: where that was read.
        size: how much was measured; empty if it cannot be shown on a CPU, or was not.
    """

    feature: str
    dimensions: tuple[str, ...]
    effect: str
    kind: str
    source: str
    size: str = ""


@dataclass(frozen=True, kw_only=True)
class Dependency(Difference):
    """A possible difference, with all dimensions on which it depends.

    Attributes:
        applies: returns True for a job that has it.
        releases: returns True for a release that does so.
    """

    applies: Callable[[JobArguments], bool] = lambda job: True
    releases: Callable[[Version], bool] = lambda version: True


DEPENDENCIES = (
    Dependency(
        "another --global-batch-size",
        (GLOBAL_BATCH,),
        "an iteration averages another number of samples",
        BY_DESIGN,
        "megatron/core/num_microbatches_calculator.py",
    ),
    Dependency(
        "--eod-mask-loss, --sft or own data without --calculate-per-token-loss",
        (MICRO_BATCH,),
        "the loss is averaged over each micro batch first, so that samples with few tokens weigh more or less",
        BY_DESIGN,
        "megatron/core/pipeline_parallel/schedules.py, `forward_step_calc_loss`",
        "9.6e-2 of the loss or the gradient norm (0 to 27 of 32 tokens masked)",
        applies=averages_masked,
    ),
    Dependency(
        "--eod-mask-loss, --sft or own data without --calculate-per-token-loss",
        (CONTEXT,),
        "each context-parallel rank averages over its own tokens",
        DEFECT,
        "pretrain_gpt.py, `loss_func`, and megatron/core/pipeline_parallel/schedules.py, `forward_step_calc_loss`",
        "5e-2 of the loss or the gradient norm (0 to 27 of 32 tokens masked)",
        applies=averages_masked,
        releases=AVERAGES_BY_CONTEXT_RANK.is_of,
    ),
    Dependency(
        "--sft with conversations that fill a sample",
        (CONTEXT,),
        "each conversation is padded to a multiple of 2 x CP tokens, and what then exceeds the sample is cut off",
        BY_DESIGN,
        "megatron/training/datasets/sft_dataset.py, `SFTDataset.__getitem__`",
        "41 tokens of a sample in the loss with CP2, 49 without (7 conversations that fill 63 of 64 tokens)",
        applies=is_tuned,
    ),
    Dependency(
        "--mtp-num-layers without --calculate-per-token-loss",
        (CONTEXT,),
        "the loss of further tokens is averaged over the tokens of each context-parallel rank, and the rank with the "
        "end of a sample has fewer",
        DEFECT,
        _FURTHER_TOKENS,
        "8.3e-5 of the loss or the gradient norm (32 tokens)",
        applies=lambda job: predicts_further(job, per_token=False),
    ),
    Dependency(
        "--mtp-num-layers with --calculate-per-token-loss",
        (CONTEXT,),
        "the loss of further tokens is weighed by the tokens of each context-parallel rank",
        DEFECT,
        _FURTHER_TOKENS,
        "1.9e-4 of the loss or the gradient norm (0 to 27 of 32 tokens masked)",
        applies=lambda job: predicts_further(job, per_token=True),
        releases=WEIGHS_FURTHER_TOKENS.is_of,
    ),
    Dependency(
        "--mtp-num-layers with --calculate-per-token-loss and masked tokens",
        (MICRO_BATCH,),
        "the loss of further tokens is weighed by the tokens of each micro batch",
        DEFECT,
        _FURTHER_TOKENS,
        "5.4e-5 of the loss or the gradient norm (0 to 27 of 32 tokens masked)",
        applies=lambda job: predicts_further(job, per_token=True) and has_masks(job),
        releases=WEIGHS_FURTHER_TOKENS.is_of,
    ),
    Dependency(
        "--moe-router-load-balancing-type aux_loss",
        (MICRO_BATCH,),
        "experts are balanced over the tokens of a micro batch",
        BY_DESIGN,
        f"{_ROUTER}, `_apply_aux_loss`",
        "2.4e-3 of the gradient norm (coefficient 1)",
        applies=lambda job: balances_by(job, ("aux_loss",)),
    ),
    Dependency(
        "--moe-router-load-balancing-type global_aux_loss",
        (MICRO_BATCHES, DATA),
        "each micro batch is balanced by those before it alone, and the loss is divided by the data-parallel size",
        DEFECT,
        f"{_ROUTER}, `_apply_global_aux_loss`",
        "1.5e-2 of the gradient norm (coefficient 1)",
        applies=lambda job: balances_by(job, ("global_aux_loss",)),
    ),
    Dependency(
        "a balancing loss with --calculate-per-token-loss",
        (TENSOR, CONTEXT),
        "its gradient is divided by the tokens of all tensor and context parallel ranks, but multiplied by one's",
        DEFECT,
        f"{_ROUTER}, `attach_and_log_load_balancing_loss`",
        "2.5e-2 of the loss or the gradient norm (coefficient 1, core_v0.16.1)",
        applies=lambda job: balances_per_token(job, _BALANCES),
        releases=SCALES_BALANCE_BY_RANK.is_of,
    ),
    Dependency(
        "--moe-router-load-balancing-type seq_aux_loss with --calculate-per-token-loss",
        (MICRO_BATCH,),
        "its gradient is divided by the tokens of a micro batch, but multiplied by those of a sample",
        DEFECT,
        f"{_ROUTER}, `_apply_seq_aux_loss`",
        "2.5e-2 of the loss or the gradient norm (coefficient 1, core_v0.16.1)",
        applies=lambda job: balances_per_token(job, ("seq_aux_loss",)),
        releases=SCALES_BALANCE_BY_BATCH.is_of,
    ),
    Dependency(
        "--expert-tensor-parallel-size other than that of tensors, without expert parallelism",
        (EXPERT_TENSOR,),
        "the gradients of experts are reduced as if they were divided like other tensors, so that they are wrong",
        DEFECT,
        "megatron/core/tensor_parallel/layers.py, `allreduce`",
        "4.3e-4 of the loss of the fourth iteration (TP2 x ETP1, bf16, 0.18.2)",
        releases=lambda version: not SEPARATES_DIVIDED_EXPERTS.is_of(version),
    ),
    Dependency(
        "--moe-expert-capacity-factor",
        (RANK_TOKENS,),
        "each rank drops tokens beyond the capacity of its own tokens",
        BY_DESIGN,
        "megatron/core/transformer/moe/moe_utils.py, `get_capacity`",
        "3e-4 of the loss (factor 0.5)",
        applies=lambda job: bool(job.num_experts) and job.raw.get("moe_expert_capacity_factor") is not None,
    ),
    Dependency(
        "--moe-router-load-balancing-type sinkhorn",
        (RANK_TOKENS,),
        "each rank balances its own tokens",
        BY_DESIGN,
        f"{_ROUTER}, `sinkhorn_load_balancing`",
        "1.5e-3 of the loss or the gradient norm",
        applies=lambda job: routes_by(job, "sinkhorn"),
    ),
    Dependency(
        "--moe-router-load-balancing-type quantile_balancing",
        (MICRO_BATCH,),
        "experts are biased by the mean of the quantiles of each micro batch",
        BY_DESIGN,
        f"{_ROUTER}, `quantile_balancing`",
        "3.5e-5 of the loss or the gradient norm, and 7.3e-4 an iteration later",
        applies=lambda job: routes_by(job, "quantile_balancing"),
    ),
    Dependency(
        "--muon-tp-mode blockwise",
        (TENSOR,),
        "each shard of a matrix is orthogonalized by itself",
        BY_DESIGN,
        "megatron/core/optimizer/emerging_optimizers.py, `TensorParallelMuon`",
        "3.7e-3 of the gradient norm",
        applies=lambda job: is_muon(job, "blockwise"),
    ),
    Dependency(
        "--softmax-type learnable",
        (TENSOR,),
        "the gradients of attention sinks on all but the first tensor-parallel rank are left out of the norm by which "
        "gradients are clipped",
        DEFECT,
        "megatron/core/transformer/dot_product_attention.py and megatron/core/tensor_parallel/layers.py, "
        "`param_is_not_tensor_parallel_duplicate`",
        "3.6e-1 of the gradient norm of sinks alone; below 1e-7 beside all others at the start of training",
        applies=clips_sinks,
    ),
    Dependency(
        "gated delta nets without --sequence-parallel",
        (TENSOR,),
        "the gradient of the output norm is that of the heads of one rank, and its copies drift apart",
        DEFECT,
        "megatron/core/ssm/gated_delta_net, `out_norm`, and megatron/core/distributed/finalize_model_grads.py, "
        "`_allreduce_non_tensor_model_parallel_grads`",
        "2.4e-5 of the loss or the gradient norm",
        applies=has_delta_nets,
    ),
    Dependency(
        "fp8 with --fp8-recipe delayed",
        (MICRO_BATCH, MICRO_BATCHES, TENSOR, CONTEXT, DATA),
        "scales follow the largest values of other groups and of as many micro batches as a history holds",
        BY_DESIGN,
        "megatron/core/parallel_state.py, `get_amax_reduction_group`, and megatron/core/fp8_utils.py",
        applies=has_delayed_scaling,
    ),
    Dependency(
        "dropout",
        (MICRO_BATCH, DATA, TENSOR, CONTEXT, PIPELINE),
        "other elements are dropped out, as often as before",
        BY_CHANCE,
        "megatron/core/tensor_parallel/random.py, `model_parallel_cuda_manual_seed`",
        applies=drops_out,
    ),
    Dependency(
        "--fim-data",
        (MICRO_BATCH, DATA),
        "other samples are rearranged to fill in the middle, as often as before",
        BY_CHANCE,
        "megatron/training/datasets/fim_dataset.py, `GPTFIMDataset`: one generator, in the order of reading",
        applies=lambda job: bool(job.raw.get("fim_data")),
    ),
    Dependency(
        "another padding of the vocabulary",
        (VOCABULARY,),
        "untrained rows take part in the softmax",
        BY_DESIGN,
        "megatron/core/tensor_parallel/cross_entropy.py, `VocabParallelCrossEntropy`",
    ),
)
"""All that depends on the layout. Label smoothing has no argument in Megatron's scripts."""
