"""Sizes of the job that wrote a checkpoint, passed by the user because the checkpoint lacks them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from mcore_ckpt_ext.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Sizes of the job that wrote a checkpoint, by Megatron's names; None if not passed.

    They are used for a checkpoint without Megatron's arguments. The index of the checkpoint has precedence over them,
    and they have precedence over files next to the checkpoint.

    Attributes:
        tensor_model_parallel_size: the number of ranks that share each layer.
        pipeline_model_parallel_size: the number of pipeline stages.
        virtual_pipeline_model_parallel_size: the number of model chunks of each pipeline rank.
        expert_model_parallel_size: the number of ranks among which experts are divided.
        expert_tensor_parallel_size: the number of ranks that share each expert.
        context_parallel_size: the number of ranks that share each sequence.

    Example:
        >>> str(open_checkpoint("run", facts=Facts(tensor_model_parallel_size=2)).job.layout)
        'TP2 x PP2 x DP2'
    """

    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    expert_model_parallel_size: int | None = None
    expert_tensor_parallel_size: int | None = None
    context_parallel_size: int | None = None

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check the values as far as possible without a checkpoint.

        Raises:
            UsageError: a value is invalid.
        """
        for name, size in self.sizes().items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UsageError(f"{name} has to be a whole number of 1 or more", found=repr(size))

    def sizes(self) -> dict[str, int]:
        """Return the sizes that the user passed, by name."""
        return {name: size for name, size in asdict(self).items() if size is not None}

    def option(self, name: str) -> str:
        """Return the command-line option for a size."""
        return f"--{self.prefix}{name.replace('_', '-')}"


class FactsOfSource(Facts):
    """Sizes of the source's job, for commands that also have options for the job that loads the result."""

    prefix = "source-"


NOTHING = Facts()
