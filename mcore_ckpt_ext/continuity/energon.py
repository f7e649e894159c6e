"""Which layouts can take up the states of Energon's data loader (`--dataloader-save`).

Each data-parallel rank saves one state for each of its workers, and each worker reads a part of the data set of its
own. Under another layout every worker's part can be read on by another rank, if there are as many workers in all:
that is what `energon checkpoint redist` does. Each sample is then read once, in other batches.

Sources: `SavableDataLoader.restore_state_rank`, megatron/energon/savable_loader.py, and `command_redist`,
megatron/energon/tools/checkpoint.py, megatron-energon 7.4.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mcore_ckpt_ext.continuity.order_change import UNKNOWN, OrderChange
from mcore_ckpt_ext.job.job_arguments import JobArguments

EXTERNAL = "external"
"""Megatron's name for a loader of the script's own."""
_RESTORING = "megatron/energon/savable_loader.py, `SavableDataLoader.restore_state_rank`"
_OF_SHARDS = "it depends on how the shards of the data set are divided among workers"
_SAVING = "megatron/training/checkpointing.py, `maybe_save_dataloader_state`"


@dataclass(frozen=True, slots=True)
class LoaderSizes:
    """The sizes of a job on which the states of its data loader depend.

    Attributes:
        data_parallel: the number of data-parallel ranks.
        workers: the workers of a rank; 0 if the rank reads by itself.
        micro_batch: the samples of a micro batch.
    """

    data_parallel: int
    workers: int
    micro_batch: int

    @classmethod
    def of(cls, job: JobArguments) -> LoaderSizes | None:
        """Return the sizes of a job; None if its arguments do not say them."""
        data = job.data_parallel_size
        workers = job.num_workers
        micro = job.micro_batch_size
        return None if data is None or workers is None or micro is None else cls(data, workers, micro)

    def __str__(self) -> str:
        return f"DP{self.data_parallel} with --num-workers {self.workers}"

    @property
    def all_workers(self) -> int:
        """The workers of all ranks."""
        return self.data_parallel * self.workers

    def takes_workers_of(self, saved: LoaderSizes) -> bool:
        """Return whether this job has a worker for each saved state."""
        is_same = (self.data_parallel, self.workers) == (saved.data_parallel, saved.workers)
        return is_same or self.all_workers == saved.all_workers > 0

    def takes_batches_of(self, saved: LoaderSizes) -> bool:
        """Return whether Energon takes up a state under the micro batch size of this job."""
        return self.micro_batch == saved.micro_batch or (self.workers > 0 and saved.micro_batch % self.micro_batch == 0)


def saves_loader_states(job: JobArguments) -> bool:
    """Return True if a job saves the states of a data loader of its own, as scripts with Energon do."""
    return job.dataloader_type == EXTERNAL and bool(job.dataloader_save)


def loader_changes(written: JobArguments, running: JobArguments) -> Iterator[OrderChange]:
    """Yield why the states of a data loader cannot be taken up; nothing if they can."""
    saved = LoaderSizes.of(written)
    present = LoaderSizes.of(running)
    if saved is None or present is None:
        yield OrderChange(
            "--dataloader-save", "the sizes of the data loader are not recorded", verdict=UNKNOWN, uncounted=_OF_SHARDS
        )
        return
    if not present.takes_workers_of(saved):
        yield OrderChange(
            f"--dataloader-save by {saved}, now {present}",
            "each worker has a state of its own: those without a worker are dropped, and other workers begin anew",
            _SAVING,
            fitting_workers(saved, present.data_parallel),
            uncounted=_OF_SHARDS,
        )
    if not present.takes_batches_of(saved):
        yield OrderChange(
            f"--micro-batch-size was {saved.micro_batch}, is {present.micro_batch}",
            "Energon takes up a state only if the new size divides the old one, and is the same without workers",
            _RESTORING,
            f"--micro-batch-size {saved.micro_batch}",
            uncounted=_OF_SHARDS,
        )


def fitting_workers(saved: LoaderSizes, data_parallel: int) -> str:
    """Return the flag with which a data-parallel size takes up all states.

    Returns:
        The flag; if there is none, all sizes that take them up, with the flag of each.
    """
    if not saved.workers:
        return str(saved)
    if saved.all_workers % data_parallel == 0:
        return f"--num-workers {saved.all_workers // data_parallel}"
    sizes = (size for size in range(1, saved.all_workers + 1) if saved.all_workers % size == 0)
    return ", or ".join(f"DP{size} with --num-workers {saved.all_workers // size}" for size in sizes)


def redistribution(written: JobArguments, running: JobArguments) -> str:
    """Return how other ranks or batches take up the states; empty if they are as before."""
    saved = LoaderSizes.of(written)
    present = LoaderSizes.of(running)
    if saved is None or present is None or saved == present:
        return ""
    if saved.data_parallel == present.data_parallel:
        return f"Energon's states are taken up with micro batch {present.micro_batch}, before {saved.micro_batch}"
    return f"Energon's states of {saved} are redistributed to {present}"
