"""The facts that a load decision depends on, of the checkpoint and of the running job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from mcore_ckpt_ext.job.differences import differing_arguments
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain
from mcore_ckpt_ext.optimizers.groups import Group


class Loop(Enum):
    """The code that loads the checkpoint."""

    MEGATRON = "megatron.training"
    LEGACY = "megatron.training, from files of ranks"
    CORE = "a loop on Megatron Core"
    MEGATRON_FSDP = "Megatron-FSDP"
    TORCH_FSDP = "torch's FSDP"


NO_CHAIN = Chain((), (), ())
UNSTATED = JobArguments.of({}, is_complete=False)


@dataclass(frozen=True)
class LoadFacts:
    """Facts of one load; facts that require reading are functions, called when a check needs them.

    Attributes:
        loop: the code that loads.
        version: the version of the running megatron-core; (0, 0) if no check of the loop depends on it.
        optimizer_format: the names of the stored optimizer formats; None if there is none or it is not needed.
        is_moved: the gradient buffers of this job differ from those of the job that saved, as far as is known.
        is_own_format: the checkpoint has the format that jobs of this loop write.
        blockers: reasons why stock Megatron cannot read the files at all.
        chain: the live optimizers.
        written: the arguments of the job that saved.
        running: the arguments of this job.
        optimizer_counts: the numbers of chained optimizers that were saved and are live; None if unknown.
        differing_arguments: returns the optimizer's arguments that differ.
        stored_groups: returns the stored parameter groups unchanged.
        has_own_files: returns True if a layer-wise optimizer finds the files of its own ranks.
        has_as_many_groups: returns True if optimizers of whole parameters have as many groups as were saved.
        is_shifted: returns True if sampled masters do not match the weights of the same names.
        is_before_first_step: returns True if the optimizer was saved before its first step, without moments.
        has_new_tokens: the job has tokens without a row in the checkpoint.
        is_packed_otherwise: the sidecar's order of parameters in the buffers differs from the live one.
    """

    loop: Loop
    version: tuple[int, int] = (0, 0)
    optimizer_format: str | None = None
    is_moved: bool = False
    is_own_format: bool = True
    blockers: Sequence[str] = ()
    chain: Chain = NO_CHAIN
    written: JobArguments = UNSTATED
    running: JobArguments = UNSTATED
    optimizer_counts: tuple[int, int] | None = None
    differing_arguments: Callable[[], Sequence[str]] = lambda: ()
    stored_groups: Callable[[], Sequence[Group]] = lambda: ()
    has_own_files: Callable[[], bool] = lambda: True
    has_as_many_groups: Callable[[], bool] = lambda: True
    is_shifted: Callable[[], bool] = lambda: False
    is_before_first_step: Callable[[], bool] = lambda: False
    has_new_tokens: bool = False
    is_packed_otherwise: bool = False

    @property
    def changes_model(self) -> bool:
        """True if the models differ by their arguments, so that either may have other parameters."""
        return bool(differing_arguments(self.written, self.running))
