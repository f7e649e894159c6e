"""Options for writing an `fsdp_dtensor` checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_ckpt_ext.formats.target import LayerSpec, Target


@dataclass(frozen=True, kw_only=True)
class FsdpDtensor(Target):
    """Write Megatron's `fsdp_dtensor`, which a job with `--use-megatron-fsdp` can resume.

    Attributes:
        megatron_version: the version that will read it; by default the installed one, or else the newest known one.
        expert_model_parallel_size: the size in the job that will read it; decides only whether experts have separate
            parameter groups.
        transformer_impl: for a Hugging Face source, the layer spec of the job that will read it, because names differ.

    Example:
        >>> convert("run", "fsdp", FsdpDtensor(megatron_version="0.19.0")).files
        4
        >>> open_checkpoint("fsdp").format.name
        'fsdp_dtensor'
    """

    name: ClassVar[str] = "fsdp_dtensor"
    for_adam: ClassVar[bool] = True

    megatron_version: str | None = None
    expert_model_parallel_size: int | None = None
    transformer_impl: LayerSpec | None = None
