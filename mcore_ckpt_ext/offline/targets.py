"""The formats that a conversion can write, by the name the user gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.base import Checkpoint
from mcore_ckpt_ext.formats.torch_dist_target import TorchDistTarget
from mcore_ckpt_ext.planning.output import Output

NEWEST = "0.19"
FORMATS = ("torch_dist", "legacy", "canonical")


@dataclass(frozen=True)
class TargetOptions:
    """What to write for; names as Megatron spells them, None for what the source has."""

    megatron_version: str = NEWEST
    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    expert_model_parallel_size: int | None = None

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor number.

        Raises:
            UnsupportedCheckpointError: it is no version.
        """
        parts = self.megatron_version.removeprefix("core_v").split(".")
        if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
            raise UnsupportedCheckpointError(
                "that is no version of Megatron", found=self.megatron_version, expected="for example 0.16.1"
            )
        return int(parts[0]), int(parts[1])


@dataclass(frozen=True)
class Target:
    """What is to be written: the files, the iteration folder they belong into (none: the destination itself)."""

    output: Output
    folder: str
    notes: Sequence[str]


def lay_out_target(checkpoint: Checkpoint, to: str, options: TargetOptions) -> Target:
    """Lay out the files of a conversion.

    Raises:
        UnsupportedCheckpointError: the format cannot hold this checkpoint.
    """
    folder = "release" if checkpoint.folder.name == "release" else f"iter_{checkpoint.iteration:07d}"
    if to == "torch_dist":
        expert = options.expert_model_parallel_size
        experts_apart = checkpoint.experts_apart if expert is None else expert > 1
        target = TorchDistTarget(checkpoint, options.version, experts_apart)
        return Target(target.output(), folder, target.notes)
    raise UnsupportedCheckpointError("unknown format", found=to, expected=", ".join(FORMATS))
