"""Options for writing an `fsdp_dtensor` checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_ckpt_ext.formats.target import LAYER_SPECS, LayerSpec, Target, check_choice, check_sizes, version_number


@dataclass(frozen=True, kw_only=True)
class FsdpDtensor(Target):
    """Megatron's `fsdp_dtensor`, which a job with `--use-megatron-fsdp` resumes.

    Attributes:
        megatron_version: the version that will read it; by default the installed one, else the newest known.
        expert_model_parallel_size: of the job that will read it; only says whether experts have parameter groups of
            their own.
        transformer_impl: layer spec of the job that will read it, for a Hugging Face source: its names differ.

    Example:
        >>> convert("run", "fsdp", FsdpDtensor(megatron_version="0.19.0")).files
        4
        >>> open_checkpoint("fsdp").format
        'fsdp_dtensor'
    """

    name: ClassVar[str] = "fsdp_dtensor"
    for_adam: ClassVar[bool] = True

    megatron_version: str | None = None
    expert_model_parallel_size: int | None = None
    transformer_impl: LayerSpec | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a source.

        Raises:
            UsageError: a value makes no sense.
        """
        check_sizes(expert_model_parallel_size=self.expert_model_parallel_size)
        check_choice("transformer_impl", self.transformer_impl, LAYER_SPECS)
        version_number(self.megatron_version)
