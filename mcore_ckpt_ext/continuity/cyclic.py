"""The order in which `--dataloader-type cyclic` reads, and how an epoch goes on under another layout.

Megatron's random sampler derives the order of an epoch from the data-parallel size and the micro batch size: with data
sharding, its default, each data-parallel rank reads a part of the data set of its own. In the middle of an epoch, the
position therefore points into another order as soon as one of the two changes. Here an epoch keeps the order in which
it began, whatever layout reads it, and every layout takes its micro batches from the same sequence of samples: each
sample is read once, and global batches of one size are the same. The next epoch is Megatron's own.

Source: `MegatronPretrainingRandomSampler.__iter__`, megatron/legacy/data/data_samplers.py (core_v0.7.0 to 0.15) and
megatron/training/datasets/data_samplers.py (0.16.0 to the development head of August 2026), the same in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mcore_ckpt_ext.job.arguments.kinds import is_whole
from mcore_ckpt_ext.job.job_arguments import JobArguments

CYCLIC = "cyclic"
"""Megatron's name for the loader with the random sampler."""
HISTORY = "ckpt_ext_data_layouts"
"""The argument, saved with Megatron's in every checkpoint, with the layouts that have read the data, oldest first."""
Permutation = Callable[[int, int], Sequence[int]]
"""Returns a permutation of so many numbers for a seed, which is the number of the epoch."""


@dataclass(frozen=True, slots=True)
class ReadingLayout:
    """How a job reads samples, from a position on.

    Attributes:
        sample: the samples that were consumed when a job began to read so.
        valid_sample: the same for validation.
        data_parallel: the number of data-parallel ranks.
        micro_batch: the samples of a micro batch.
        valid_micro_batch: the same for validation.
        is_sharded: True if each rank reads a part of the data set of its own (`--no-data-sharding` switches it off).
    """

    sample: int
    valid_sample: int
    data_parallel: int
    micro_batch: int
    valid_micro_batch: int
    is_sharded: bool

    @classmethod
    def of(cls, job: JobArguments, sample: int = 0, valid_sample: int = 0) -> ReadingLayout | None:
        """Return how a job reads; None if its arguments do not say it.

        Args:
            job: the arguments of the job.
            sample: the samples that were consumed when it began.
            valid_sample: the same for validation.
        """
        data = job.data_parallel_size
        micro = job.micro_batch_size
        if data is None or micro is None:
            return None
        valid = job.raw.get("eval_micro_batch_size") or micro
        return cls(sample, valid_sample, data, micro, int(valid), job.data_sharding is not False)

    @property
    def reads(self) -> tuple[int, int, int, bool]:
        """All that distinguishes two ways of reading."""
        return self.data_parallel, self.micro_batch, self.valid_micro_batch, self.is_sharded

    def begins_at(self, sample: int, valid_sample: int) -> bool:
        """Return whether a job that read so has read nothing yet at a position."""
        return (self.sample, self.valid_sample) == (sample, valid_sample)

    @property
    def step(self) -> int:
        """The samples that all ranks read at once."""
        return self.data_parallel * self.micro_batch

    @property
    def validation_layout(self) -> ReadingLayout:
        """The same for the samples of validation."""
        return replace(self, sample=self.valid_sample, micro_batch=self.valid_micro_batch)

    def __str__(self) -> str:
        return f"DP{self.data_parallel} with micro batch {self.micro_batch}"


_FIELDS = tuple(field.name for field in fields(ReadingLayout))


def history_of(written: JobArguments, running: JobArguments) -> tuple[ReadingLayout, ...]:
    """Return the layouts that have read the data of a run, the resuming job's last.

    A job that this package did not resume has recorded none: then Megatron has derived all from its own layout.

    Args:
        written: the arguments of the job that saved the checkpoint.
        running: the arguments of the job that resumes it.

    Returns:
        The layouts; empty if the arguments do not name them. A single one means that nothing has changed.
    """
    sample = written.consumed_train_samples or 0
    valid = written.consumed_valid_samples or 0
    last = ReadingLayout.of(written)
    present = ReadingLayout.of(running, sample, valid)
    if last is None or present is None:
        return ()
    past = _recorded_history(written) or [last]
    if past[-1].reads != last.reads:  # a conversion, or a job without this package, has changed the layout since
        past = [last]
    while len(past) > 1 and past[-1].begins_at(sample, valid):  # it has read nothing
        past.pop()
    if past[-1].reads == present.reads:
        return tuple(past)
    return (present,) if past[-1].begins_at(sample, valid) else (*past, present)


def as_argument(history: Sequence[ReadingLayout]) -> list[dict[str, Any]] | None:
    """Return a history as the value of the argument that checkpoints carry; None if nothing has changed."""
    if len(history) < 2:
        return None
    return [asdict(layout) for layout in history]


def _recorded_history(written: JobArguments) -> list[ReadingLayout]:
    """Return the recorded history of a checkpoint; empty if it has none, or one that no job writes."""
    recorded = written.raw.get(HISTORY)
    if not isinstance(recorded, Sequence) or isinstance(recorded, str):
        return []
    history: list[ReadingLayout] = []
    for entry in recorded:
        layout = _layout_in(entry)
        if layout is None or (history and layout.sample < history[-1].sample):
            return []
        history.append(layout)
    return history


def _layout_in(entry: Any) -> ReadingLayout | None:
    """Return a recorded layout; None if it is none."""
    if not isinstance(entry, Mapping):
        return None
    values: dict[str, Any] = {name: entry.get(name) for name in _FIELDS}
    *numbers, is_sharded = values.values()
    is_valid = all(map(is_whole, numbers)) and min(numbers[:2]) >= 0 and min(numbers[2:]) >= 1
    return ReadingLayout(**values) if is_valid and isinstance(is_sharded, bool) else None


@dataclass(frozen=True, slots=True)
class EpochInProgress:
    """The epoch at a position of a run.

    Attributes:
        epoch: its number, from 0 on.
        start: the samples that were consumed when it began.
        end: the samples that are consumed when it ends, under the present layout.
        order: the layout in which it began, whose order it keeps.
        samples: the samples of the data set.
    """

    epoch: int
    start: int
    end: int
    order: ReadingLayout
    samples: int

    def sample_at(self, permutation: Permutation) -> Callable[[int], int]:
        """Return a function from a position in this epoch to the sample that is read there.

        Samples that the order of the epoch leaves out, because they fill no batch, are the last.

        Args:
            permutation: the permutation that Megatron draws for the epoch.
        """
        order = self.order
        samples = self.samples
        if order.is_sharded:
            part = samples // order.step * order.micro_batch
            drawn = permutation(part, self.epoch)
            in_order = part * order.data_parallel

            def shard_position(position: int) -> int:
                if position >= in_order:
                    return position
                step, place = divmod(position, order.step)
                rank, number = divmod(place, order.micro_batch)
                return rank * part + int(drawn[step * order.micro_batch + number])

            return shard_position
        whole = samples // order.micro_batch * order.micro_batch
        drawn = permutation(whole, self.epoch)
        return lambda position: int(drawn[position]) if position < whole else position


def epoch_at(history: Sequence[ReadingLayout], samples: int, consumed: int) -> EpochInProgress:
    """Return the epoch in progress at a position.

    Args:
        history: the layouts that have read the data, at least one, oldest first.
        samples: the samples of the data set, at least those that the last layout reads at once.
        consumed: the samples that were consumed.
    """
    epoch = start = end = 0
    order = history[0]
    positions = [*(layout.sample for layout in history[1:]), consumed]
    for layout, until in zip(history, positions, strict=True):
        if layout.sample <= start:
            order = layout
        read = max(layout.sample - start, 0)
        end = start + read + max(samples - read, 0) // layout.step * layout.step
        epoch_size = samples // layout.step * layout.step
        if end <= until and epoch_size:
            # The epoch in progress has ended under this layout, and so have further ones, in its own order.
            further = (until - end) // epoch_size
            epoch += 1 + further
            start = end + further * epoch_size
            end = start + epoch_size
            order = layout
    return EpochInProgress(epoch, start, end, order, samples)


def micro_batches(
    epoch: EpochInProgress, layout: ReadingLayout, consumed: int, rank: int, permutation: Permutation
) -> Iterator[list[int]]:
    """Yield the micro batches that a rank still reads in an epoch.

    An incomplete last batch is left out, as by Megatron.

    Args:
        epoch: the epoch.
        layout: the present layout.
        consumed: the samples that were consumed.
        rank: the data-parallel rank.
        permutation: see `EpochInProgress.sample_at`.
    """
    sample_at = epoch.sample_at(permutation)
    # Within a step, Megatron deals single samples to the ranks if the data is not sharded.
    first, apart = (rank * layout.micro_batch, 1) if layout.is_sharded else (rank, layout.data_parallel)
    places = range(first, first + layout.micro_batch * apart, apart)
    for step in range(consumed - epoch.start, epoch.end - epoch.start, layout.step):
        yield [sample_at(step + place) for place in places]
