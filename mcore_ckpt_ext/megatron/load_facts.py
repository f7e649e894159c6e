"""The facts that a load decision depends on: of the checkpoint, of the running job, and of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain
from mcore_ckpt_ext.optimizers.groups import Group

Version = tuple[int, int]


class Loop(Enum):
    """Whose code loads."""

    MEGATRON = "megatron.training"
    LEGACY = "megatron.training, from files of ranks"
    CORE = "a loop on Megatron Core"
    MEGATRON_FSDP = "Megatron-FSDP"
    TORCH_FSDP = "torch's FSDP"


NO_CHAIN = Chain((), (), ())
UNSTATED = JobArguments.of({}, is_complete=False)


def _no_groups() -> Sequence[Group]:
    return ()


def _no() -> bool:
    return False


def _yes() -> bool:
    return True


def _none() -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class LoadFacts:
    """Facts of one load; those that have to be read first are functions, which are called when a check needs them.

    Attributes:
        loop: whose code loads.
        version: of the running megatron-core; (0, 0) where no check of the loop depends on it.
        optimizer_format: names of the stored optimizer encodings.
        is_moved: the gradient buffers of the run differ from those of the job that saved, as far as is known.
        is_own_format: the checkpoint has the format that jobs of this loop write.
        blockers: what keeps stock Megatron from reading the files at all.
        chain: the live optimizers.
        written: the arguments of the job that saved.
        running: the arguments of this job.
        optimizer_counts: how many chained optimizers were saved, and how many are live; None where nothing says so.
        switched: the optimizer's arguments that differ.
        stored_groups: the stored parameter groups as they are.
        has_own_files: a layer-wise optimizer finds the files of its own ranks.
        has_as_many_groups: optimizers of whole parameters have as many groups as were saved.
        is_shifted: masters in samples are not those of the weights whose names they bear.
        is_before_first_step: the optimizer was saved before its first step, without moments.
        has_new_tokens: the job has tokens that the checkpoint holds no row for.
        is_packed_otherwise: the sidecar shows other places in the buffers; known once all ranks have compared.
    """

    loop: Loop
    version: Version = (0, 0)
    optimizer_format: str | None = None
    is_moved: bool = False
    is_own_format: bool = True
    blockers: Sequence[str] = ()
    chain: Chain = NO_CHAIN
    written: JobArguments = UNSTATED
    running: JobArguments = UNSTATED
    optimizer_counts: tuple[int, int] | None = None
    switched: Callable[[], Sequence[str]] = _none
    stored_groups: Callable[[], Sequence[Group]] = _no_groups
    has_own_files: Callable[[], bool] = _yes
    has_as_many_groups: Callable[[], bool] = _yes
    is_shifted: Callable[[], bool] = _no
    is_before_first_step: Callable[[], bool] = _no
    has_new_tokens: bool = False
    is_packed_otherwise: bool = False
