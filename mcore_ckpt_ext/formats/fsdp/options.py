"""Options for writing an `fsdp_dtensor` checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mcore_ckpt_ext.formats.target import LAYER_SPECS, LayerSpec, Target, check_choice, check_sizes, version_number


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
        >>> open_checkpoint("fsdp").format
        'fsdp_dtensor'
    """

    name: ClassVar[str] = "fsdp_dtensor"
    for_adam: ClassVar[bool] = True

    megatron_version: str | None = None
    expert_model_parallel_size: int | None = None
    transformer_impl: LayerSpec | None = None

    def __post_init__(self) -> None:
        """Check the options that can be checked without a source.

        Raises:
            UsageError: an option has an invalid value.
        """
        check_sizes(expert_model_parallel_size=self.expert_model_parallel_size)
        check_choice("transformer_impl", self.transformer_impl, LAYER_SPECS)
        version_number(self.megatron_version)
