"""Which jobs have a feature that `continuity.dependencies` lists."""

from __future__ import annotations

from typing import Any

from mcore_ckpt_ext.continuity.energon import EXTERNAL
from mcore_ckpt_ext.job.job_arguments import JobArguments

# `gdn` and `gdn2` on the development head (experimental_attention_variant_module_specs.py).
_DELTA_NETS = ("gated_delta_net", "gdn", "gdn2")


def _number(job: JobArguments, name: str, default: float = 0) -> float:
    value = job.raw.get(name)
    return float(value) if isinstance(value, (int, float)) else default


def balances_by(job: JobArguments, kinds: tuple[str, ...]) -> bool:
    """Return True if a job balances its experts by a loss of one of these kinds."""
    types = _balancing_types(job)
    weight = job.raw.get("moe_aux_loss_coeff")
    weights = weight if isinstance(weight, (list, tuple)) else [weight] * len(types)
    return any(name in kinds and loss_weight for name, loss_weight in zip(types, weights, strict=False))


def routes_by(job: JobArguments, kind: str) -> bool:
    """Return True if a job chooses its experts in this way."""
    return kind in _balancing_types(job)


def _balancing_types(job: JobArguments) -> list[str]:
    """Return the values of `--moe-router-load-balancing-type`; empty without experts."""
    chosen: Any = job.raw.get("moe_router_load_balancing_type") or "aux_loss"
    types = list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]
    return types if job.num_experts else []


def is_tuned(job: JobArguments) -> bool:
    """Return True if the samples of a job are conversations, as `--sft` packs them."""
    return bool(job.raw.get("sft"))


def has_masks(job: JobArguments) -> bool:
    """Return True if samples may have different numbers of tokens in the loss."""
    return job.dataloader_type == EXTERNAL or is_tuned(job) or bool(job.raw.get("eod_mask_loss"))


def averages_masked(job: JobArguments) -> bool:
    """Return True if a job averages its loss over each micro batch of uneven samples."""
    return has_masks(job) and not job.raw.get("calculate_per_token_loss")


def predicts_further(job: JobArguments, *, per_token: bool) -> bool:
    """Return True if a job predicts further tokens, with a loss per token or not."""
    return bool(job.raw.get("mtp_num_layers")) and bool(job.raw.get("calculate_per_token_loss")) is per_token


def drops_out(job: JobArguments) -> bool:
    """Return True if a job drops out elements; 0.1 is Megatron's default."""
    return any(_number(job, name, 0.1) > 0 for name in ("hidden_dropout", "attention_dropout"))


def is_muon(job: JobArguments, mode: str) -> bool:
    """Return True if a job steps by Muon in this mode of tensor parallelism."""
    return "muon" in str(job.raw.get("optimizer")) and job.raw.get("muon_tp_mode") == mode


def has_delayed_scaling(job: JobArguments) -> bool:
    """Return True if a job scales fp8 by a history of largest values, as Megatron does without a recipe."""
    return bool(job.raw.get("fp8")) and (job.raw.get("fp8_recipe") or "delayed") == "delayed"


def has_delta_nets(job: JobArguments) -> bool:
    """Return True if a job has gated delta nets: by name, or as `G` in a hybrid pattern."""
    variant = job.raw.get("experimental_attention_variant") or job.raw.get("linear_attention_type")
    is_in_pattern = "G" in str(job.raw.get("hybrid_layer_pattern"))
    return (variant in _DELTA_NETS or is_in_pattern) and not job.raw.get("sequence_parallel")


def clips_sinks(job: JobArguments) -> bool:
    """Return True if a job trains attention sinks, and clips its gradients; 1.0 is Megatron's default."""
    return job.raw.get("softmax_type") == "learnable" and _number(job, "clip_grad", 1.0) > 0


def balances_per_token(job: JobArguments, kinds: tuple[str, ...]) -> bool:
    """Return True if a job balances its experts by such a loss, and weighs losses per token."""
    return bool(job.raw.get("calculate_per_token_loss")) and balances_by(job, kinds)
