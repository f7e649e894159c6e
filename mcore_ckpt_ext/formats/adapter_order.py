"""Adapters whose rows Megatron-Bridge distributes wrongly under another tensor parallel size."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_ckpt_ext.errors import join_some
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.model_space.adapters import is_adapter, is_swift_name, rank_ordered_adapters
from mcore_ckpt_ext.model_space.tensors import WEIGHT

_GATED = ("swiglu", "gated_linear_unit", "quick_geglu")
_BY_COLUMNS = (".linear_proj.adapter.weight_magnitude", ".linear_fc2.adapter.weight_magnitude")


def size_ordered_adapters(checkpoint: CheckpointView, running: JobArguments | None = None) -> list[str]:
    """Return such adapters' names; see `rank_ordered_adapters`.

    `running` has the live job's arguments, if there is one.
    """
    names = [name for name in checkpoint.names(WEIGHT) if is_adapter(name)]
    jobs = [job for job in (checkpoint.job.arguments(), running) if job is not None]
    gated = any(job.swiglu or job.gated_linear_unit or job.quick_geglu for job in jobs)
    if not any(job.is_set(name) for job in jobs for name in _GATED):
        gated = any(map(is_swift_name, names))  # ms-swift may not store these arguments; nearly all models have gates
    return rank_ordered_adapters(names, gated)


def loop_of(names: Sequence[str]) -> str:
    """Return the training loop that uses these adapter names."""
    return "ms-swift" if any(map(is_swift_name, names)) else "Megatron-Bridge"


def about_order(checkpoint: CheckpointView) -> list[str]:
    """Warn that a converted checkpoint can be resumed under one tensor parallel size only."""
    adapters = size_ordered_adapters(checkpoint)
    if not adapters:
        return []
    return [
        f"resume under TP{checkpoint.job.layout.tensor} only: {loop_of(adapters)} reads the rows of some adapters "
        f"wrongly under another tensor parallel size: {join_some(adapters, 1)}"
    ]


def about_norms(checkpoint: CheckpointView, who: str) -> list[str]:
    """Report DoRA adapters trained with norms of partial rows, so that they define another model.

    `who`: the words before "another model" in the message.
    """
    names = [name for name in checkpoint.names(WEIGHT) if name.endswith(_BY_COLUMNS)]
    if not names or "tensor" in checkpoint.job.layout.unknown or checkpoint.job.layout.tensor == 1:
        return []
    # `DoRALinear._get_weight_norm` (peft/dora_layers.py, megatron-bridge 0.3.1).
    return [
        f"under {checkpoint.job.layout} Megatron-Bridge divided {join_some(names, 1)} by norms of each rank's columns "
        f"alone: {who} another model than the one that was trained"
    ]
