"""Arguments that compute something else under another layout, not only in another order.

A job computes the same but for rounding under every layout, except where a loss, a norm, a router or an optimizer works
on a group of ranks or on a micro batch. Each row was read in the sources that it names. The figures are from
`scripts/same_training.py`: relative differences of the loss or the gradient norm of the next two iterations in fp32,
where rounding stays below 2e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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
    predicts_further,
    routes_by,
)
from mcore_ckpt_ext.continuity.sizes import (
    CONTEXT,
    DATA,
    GLOBAL_BATCH,
    MICRO_BATCH,
    MICRO_BATCHES,
    PIPELINE,
    RANK_TOKENS,
    TENSOR,
    VOCABULARY,
    sizes_of_job,
)
from mcore_ckpt_ext.errors import join_some
from mcore_ckpt_ext.job.differences import differing_arguments
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import (
    AVERAGES_BY_CONTEXT_RANK,
    SCALES_BALANCE_BY_BATCH,
    SCALES_BALANCE_BY_RANK,
    WEIGHS_FURTHER_TOKENS,
)
from mcore_ckpt_ext.versions import Version

SAME_TRAINING: Final = "same training, but for rounding"
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
        "another padding of the vocabulary",
        (VOCABULARY,),
        "untrained rows take part in the softmax",
        BY_DESIGN,
        "megatron/core/tensor_parallel/cross_entropy.py, `VocabParallelCrossEntropy`",
    ),
)
"""All that depends on the layout. Label smoothing has no argument in Megatron's scripts."""


def differences(
    job: JobArguments, old: Mapping[str, float | None], new: Mapping[str, float | None], version: Version
) -> tuple[Difference, ...]:
    """Return what a job computes otherwise under another layout; empty if nothing but rounding.

    Args:
        job: the arguments of the job under the new layout; its sizes are not looked at.
        old: the sizes of the job that saved the checkpoint, as `sizes_of` returns them; unknown ones are unchanged.
        new: those of the job that resumes it.
        version: the release that runs.
    """
    changed = {name for name, size in old.items() if None not in (size, new[name]) and size != new[name]}
    return tuple(
        Difference(row.feature, dimensions, row.effect, row.kind, row.source, row.size)
        for row in DEPENDENCIES
        if (dimensions := tuple(dimension for dimension in row.dimensions if dimension in changed))
        and row.applies(job)
        and row.releases(version)
    )


def differences_of_jobs(written: JobArguments, running: JobArguments, version: Version) -> tuple[Difference, ...]:
    """Return what a job computes otherwise than the one that saved its checkpoint.

    Args:
        written: the arguments of the job that saved the checkpoint.
        running: the arguments of the job that resumes it.
        version: the release that runs.
    """
    return differences(running, *_sizes_of_jobs(written, running), version)


def comparison_of_jobs(written: JobArguments, running: JobArguments, version: Version) -> str:
    """Return in one line whether a job computes the same as the one that saved its checkpoint.

    For the arguments see `differences_of_jobs`.

    Returns:
        The line; empty if neither layout nor model has changed, or if the arguments of the saving job are unknown.
    """
    changed = differing_arguments(written, running)
    old, new = _sizes_of_jobs(written, running)
    if not written.is_complete or (old == new and not changed):
        return ""
    sentence = sentence_of(differences(running, old, new, version))
    return f"other arguments of the model: {join_some(changed)}; apart from them: {sentence}" if changed else sentence


def _sizes_of_jobs(
    written: JobArguments, running: JobArguments
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Return the sizes of both jobs from the samples on that the first one has consumed."""
    consumed = written.consumed_train_samples or 0
    return sizes_of_job(written, consumed), sizes_of_job(running, consumed)


def is_same_training(differences: Iterable[Difference]) -> bool:
    """Return True if nothing differs but rounding and what is drawn by chance."""
    return all(difference.kind == BY_CHANCE for difference in differences)


def sentence_of(found: Sequence[Difference]) -> str:
    """Return the differences in one line."""
    if not found:
        return SAME_TRAINING
    if is_same_training(found):
        features = ", ".join(difference.feature for difference in found)
        return f"{SAME_TRAINING} and {features}, which draws other elements"
    reasons = (f"{difference.feature}: {difference.effect}" for difference in found if difference.kind != BY_CHANCE)
    return f"not the same training: {'; '.join(reasons)}"
