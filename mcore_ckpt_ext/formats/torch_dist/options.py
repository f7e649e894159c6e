"""Options for writing a `torch_dist` checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from typing_extensions import override

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.formats.target import LayerSpec, Target, check_choice
from mcore_ckpt_ext.job.assignments import parse_assignments
from mcore_ckpt_ext.job.layer_form import LAYER_FORM

LOOPS = ("megatron", "bridge")
Loop: TypeAlias = Literal["megatron", "bridge"]


@dataclass(frozen=True, kw_only=True)
class TorchDist(Target):
    """Write Megatron's `torch_dist`, in an optimizer format that stock Megatron resumes under any layout.

    Attributes:
        megatron_version: the version that will read it; by default the installed one, or else the newest known one.
        expert_model_parallel_size: the size in the job that will read it; decides only whether experts have an
            optimizer of their own.
        transformer_impl: the layer spec of the job that will read it, because names and extra states differ; by default
            the source's, or Transformer Engine's for a Hugging Face folder.
        loop: the training loop that will read it: Megatron's own, or Megatron-Bridge, whose checkpoints have
            `run_config.yaml` and `train_state.pt` instead of Megatron's arguments.
        arguments: arguments of the job that will read it, as `NAME=VALUE`, that decide whether layers are stacked:
            `moe_layer_freq=([1]*48)` if its script passes a list, which stores each layer by itself.

    Example:
        >>> convert("run", "torch_dist", TorchDist(megatron_version="0.13.1")).files
        6
        >>> open_checkpoint("torch_dist").optimizer.format()
        'fully_sharded_model_space'
    """

    name: ClassVar[str] = "torch_dist"
    holds_adapters: ClassVar[bool] = True

    megatron_version: str | None = None
    expert_model_parallel_size: int | None = None
    transformer_impl: LayerSpec | None = None
    loop: Loop = "megatron"
    arguments: Sequence[str] = ()

    @property
    def is_for_bridge(self) -> bool:
        """True if Megatron-Bridge will read it."""
        return self.loop == "bridge"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("loop", self.loop, LOOPS)
        if others := parse_assignments(self.arguments).keys() - LAYER_FORM:
            raise UsageError(
                "torch_dist takes only arguments that decide how its layers are stored",
                found=", ".join(sorted(others)),
                expected=", ".join(sorted(LAYER_FORM)),
                hint="all others are those of the job that wrote the checkpoint: leave them out",
            )
