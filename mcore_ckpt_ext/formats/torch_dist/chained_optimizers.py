"""The chain of optimizers in a torch_dist checkpoint to write, if not all of them are distributed.

In a job with `--optimizer muon --use-distributed-optimizer`, the optimizer of the parameters that Muon does not update
depends on the release. Up to core_v0.19.0 it is the LayerWiseDistributedOptimizer; since core_v0.19.1 it may be a
separate DistributedOptimizer, if the model is built by a function; on the development head of August 2026 it always is,
unless `--no-use-layer-wise-param-layout` is given (`_get_megatron_emerging_optimizer`,
megatron/core/optimizer/__init__.py; `setup_model_and_optimizer`, megatron/training/training.py). Stock Megatron loads
only the split that its own job has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_ckpt_ext.formats.portable_state import (
    SHARDING_MARK,
    has_experts,
    inner_state,
    mark_undistributed,
    portable_chain,
)
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.releases import MAY_SPLIT_LAYER_WISE, splits_layer_wise
from mcore_ckpt_ext.optimizers.description import MOMENTUM
from mcore_ckpt_ext.optimizers.groups import MOMENTUM as BY_MOMENTUM
from mcore_ckpt_ext.optimizers.groups import rule_of
from mcore_ckpt_ext.optimizers.model_space_formats import is_layer_wise


class ChainedOptimizers:
    """The chained optimizers of a checkpoint as one release stores them."""

    def __init__(self, checkpoint: CheckpointView, version: tuple[int, int], *, has_expert_optimizer: bool) -> None:
        """Choose the split.

        Args:
            checkpoint: the source.
            version: the release that will read the written checkpoint.
            has_expert_optimizer: whether experts have an optimizer of their own in that job.
        """
        self._checkpoint = checkpoint
        self._version = version
        self._has_expert_optimizer = has_expert_optimizer
        self._source = (
            checkpoint.optimizer.chained_optimizer_settings() if checkpoint.optimizer.format() is not None else []
        )
        self._was_split = any(SHARDING_MARK in child for child in self._source)
        self._is_resplit = not self._was_split and self._splits_by_default()
        self._stepped_by_muon = (
            frozenset(checkpoint.optimizer.state().names(MOMENTUM)) if self._is_resplit else frozenset()
        )

    def is_distributed(self, name: str) -> bool:
        """Return whether a DistributedOptimizer has the state of a parameter."""
        if not self._source:
            return True
        if self._is_resplit:
            return name not in self._stepped_by_muon
        return MAY_SPLIT_LAYER_WISE.is_of(self._version) and self._checkpoint.optimizer.state().is_distributed(name)

    def entries(self, encoding: str) -> list[dict[str, Any]]:
        """Return the entry of each optimizer in the common state, marking distributed ones; empty if all are."""
        children = portable_chain(self._source, self._has_expert_optimizer)
        if self._is_resplit:
            by_muon = [child for child in children if _is_muons(child)]
            return [*by_muon, *(_distribute(child, encoding) for child in children if not _is_muons(child))]
        if not MAY_SPLIT_LAYER_WISE.is_of(self._version):
            return mark_undistributed(children)
        return [{**child, SHARDING_MARK: encoding} if SHARDING_MARK in child else child for child in children]

    def notes(self) -> Iterator[str]:
        """Yield which jobs load the written split, if that is not obvious."""
        if self._is_resplit:
            yield (
                "the optimizer of the parameters that Muon does not update is written as a separate "
                "DistributedOptimizer, as that version has it; a job with --no-use-layer-wise-param-layout resumes it "
                "with this package only"
            )
        elif self._was_split and not MAY_SPLIT_LAYER_WISE.is_of(self._version):
            yield (
                "the whole optimizer is written as a layer-wise one: that version has no separate DistributedOptimizer"
            )
        elif self._was_split and not splits_layer_wise(self._version):
            yield (
                "a part of the optimizer is written as a separate DistributedOptimizer, as in the source: core_v0.19.1 "
                "and later have one in addition to a layer-wise optimizer if the model is built by a function; other "
                "jobs resume it with this package only"
            )

    def _splits_by_default(self) -> bool:
        """Return whether a job of that release has a separate optimizer for Adam or Lion by default.

        The job has the source's arguments.

        Such a job is impossible if there are experts that Muon does not update, so the source's job had
        `--no-use-layer-wise-param-layout`. Chains of Lion or SOAP with Adam are not split: in them the development
        head's DistributedOptimizer drops Adam's second moment (`optimizer_state_keys`, distrib_optimizer.py), so stock
        Megatron cannot resume any file.
        """
        arguments = self._checkpoint.job.arguments()
        others = [child for child in self._source if not _is_muons(child)]
        return (
            splits_layer_wise(self._version)
            and is_layer_wise(arguments)
            and arguments.raw.get("use_layer_wise_param_layout") is not False
            and 0 < len(others) < len(self._source)
            and not has_experts(others)
        )


def _is_muons(child: Mapping[str, Any]) -> bool:
    return any(rule_of(group) == BY_MOMENTUM for group in inner_state(child)["param_groups"])


def _distribute(child: Mapping[str, Any], encoding: str) -> dict[str, Any]:
    """Convert the entry of an optimizer of whole parameters to that of a DistributedOptimizer."""
    inner = inner_state(child)
    step = (inner.get("state") or {}).get("common_step")
    groups = [group if step is None else {"step": step, **group} for group in inner["param_groups"]]
    kept = {key: child[key] for key in ("grad_scaler",) if key in child}
    return {"optimizer": {"param_groups": groups}, **kept, SHARDING_MARK: encoding}
