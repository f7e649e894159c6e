"""Checks that stock Megatron finds its parameter groups among the stored ones, with their settings."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_ckpt_ext.formats.common_state import common_optimizers
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain
from mcore_ckpt_ext.optimizers.groups import IDENTITY, REFINED_IDENTITY, Group, identity, lacks

_BIAS_CORRECTION = "bias_correction"
_RATES = ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr")


def has_other_rates(written: JobArguments, running: JobArguments) -> bool:
    """Return True if a learning rate, and so the bounds of groups, differs from the checkpoint's."""
    shared_rates = [rate for rate in _RATES if rate in written.raw and rate in running.raw]
    return any(written.raw[rate] != running.raw[rate] for rate in shared_rates)


def overrides_own_bounds(running: JobArguments, chain: Chain) -> bool:
    """Return True if --override-opt_param-scheduler would replace the bounds of a group that has its own."""
    settings = running.raw
    if not settings.get("override_opt_param_scheduler"):
        return False

    def is_its_own(group: Group, bound: str, rate: str) -> bool:
        configured = settings.get(f"decoupled_{rate}" if group.get("is_decoupled_lr") else rate)
        return configured is not None and group.get(bound) not in (None, configured)

    live = [group for child in chain.supported for group in child.optimizer.param_groups]
    return any(is_its_own(group, *names) for group in live for names in (("max_lr", "lr"), ("min_lr", "min_lr")))


def lacks_identity(stored: Sequence[Group]) -> bool:
    """Return True if a stored group lacks a setting by which Megatron distinguishes groups."""
    return any(lacks(group, key) for group in stored for key in IDENTITY)


def has_confused_groups(stored: Sequence[Group]) -> bool:
    """Return True if stored groups that Megatron takes for one have different learning rates or epsilons.

    They come from --decoupled-lr or --use-mup. Megatron gives all of them the settings of the last one
    (`make_needed_groups`, megatron/core/optimizer/distrib_optimizer.py, core_v0.16.1), and then trains with its rate.
    """
    return len(_identities(stored, (*REFINED_IDENTITY, "eps"))) > len(_identities(stored, IDENTITY))


def lacks_live_group(stored: Sequence[Group], chain: Chain) -> bool:
    """Return True if a live group has no stored counterpart, by the running Megatron's identifiers."""
    keys = getattr(sys.modules.get("megatron.core.optimizer.optimizer"), "param_group_identifier_keys", IDENTITY)
    stored_identities = _identities(stored, keys)
    # Layer-wise optimizers match their groups in other ways.
    whole = [child for child, layer_wise in chain.whole if layer_wise is None]
    live = [group for child in (*chain.distributed, *whole) for group in child.optimizer.param_groups]
    return bool(stored) and any(identity(group, keys) not in stored_identities for group in live)


def shifts_groups(chain: Chain) -> bool:
    """Return True if stock Megatron copies masters into other groups, because an empty one precedes them.

    Pipeline stages without embeddings have one. Stock Megatron 0.16.1 to 0.19.2 requests the list of groups without
    empty ones (`extract_matching_values`, megatron/core/dist_checkpointing/dict_utils.py), which loads the masters in
    place; then it copies this list into the live groups, by position (`load_state_dict` of
    Float16OptimizerWithFloat16Params, megatron/core/optimizer/optimizer.py). Seen with Muon, --decoupled-lr and
    --apply-wd-to-qk-layernorm. A layer-wise optimizer wraps its empty groups (`sharded_state_dict`,
    layer_wise_optimizer.py).
    """
    plain = (child for child, layer_wise in chain.whole if layer_wise is None)
    listed = (list(getattr(child, "fp32_from_float16_groups", ())) for child in plain)
    return any(
        group and group is not loaded
        for groups in listed
        for group, loaded in zip(groups, filter(None, groups), strict=False)
    )


def _identities(groups: Sequence[Group], keys: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the different identities of groups, whose values a damaged file may have made unhashable."""
    different: list[tuple[Any, ...]] = []
    for group in groups:
        if (values := identity(group, keys)) not in different:
            different.append(values)
    return different


def lacks_bias_correction(stored: Sequence[Group], chain: Chain) -> bool:
    """Return True if a live fused Adam needs a setting that no stored group has.

    Groups of torch's Adam lack it.

    `Optimizer.load_state_dict` replaces the live groups with the stored ones (torch/optim/optimizer.py, 2.13), and the
    first step fails with a KeyError (`FusedAdam.step`, transformer_engine/pytorch/optimizers/fused_adam.py).
    """
    is_needed = any(_BIAS_CORRECTION in getattr(child.optimizer, "defaults", ()) for child in chain.supported)
    return is_needed and bool(stored) and not any(_BIAS_CORRECTION in group for group in stored)


def has_as_many_groups(common: Mapping[str, Any], chain: Chain) -> bool:
    """Return True if the optimizers of whole parameters have as many parameter groups as were saved."""
    children = [child.get("optimizer", child) for child in common_optimizers(common)]
    stored = [len(child["param_groups"]) for child in children if "param_groups" in child]
    live = [len(child.optimizer.param_groups) for child, _ in chain.whole]
    # The groups of a DistributedOptimizer may be stored elsewhere, and come last.
    return not stored or stored == live or (bool(chain.distributed) and stored[: len(live)] == live)
