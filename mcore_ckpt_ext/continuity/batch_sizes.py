"""Global batch sizes that a schedule still brings, and those that a layout does not divide."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import RAMPS_UP_BATCH
from mcore_ckpt_ext.versions import Version

_SUFFIXES = {"T": 10**12, "B": 10**9, "M": 10**6, "K": 10**3}
SCHEDULES = ("rampup_batch_size", "step_batch_size_schedule")
"""The arguments with a schedule of the batch, of which a release runs one."""
# Ramps of real jobs have some dozens of steps.
_MOST_STEPS = 1 << 20


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A global batch size of a schedule.

    Attributes:
        sample: the number of consumed samples from which on it applies.
        size: the number of samples of an iteration.
    """

    sample: int
    size: int


def sizes_to_come(job: JobArguments, consumed: int) -> list[BatchSize]:
    """Return the global batch sizes of a job's schedule from a position on; empty without a schedule.

    Sources, megatron/core/num_microbatches_calculator.py: `StepBatchsizeNumMicroBatchesCalculator` (core_v0.18.0 to the
    development head of August 2026) and `RampupBatchsizeNumMicroBatchesCalculator` (core_v0.7.0 to 0.17.1).

    Args:
        job: the arguments of the job.
        consumed: the samples that were consumed.
    """
    steps = _steps(job)
    first = max(bisect_right(steps, consumed, key=lambda step: step.sample), 1)
    return [BatchSize(max(step.sample, consumed), step.size) for step in steps[first - 1 : first]] + [*steps[first:]]


def indivisible_sizes(job: JobArguments, consumed: int) -> list[BatchSize]:
    """Return the sizes of a job's schedule at which it will stop, from a position on.

    A size has to be a multiple of micro batch size and data-parallel size (`update`, in the same module), or not below
    it with `--decrease-batch-size-if-needed`.
    """
    divisor = (job.micro_batch_size or 0) * (job.data_parallel_size or 0)
    if not divisor:
        return []
    to_come = sizes_to_come(job, consumed)
    if job.decrease_batch_size_if_needed:
        return [batch for batch in to_come if batch.size < divisor]
    return [batch for batch in to_come if batch.size % divisor]


def global_batch_of(job: JobArguments) -> int | None:
    """Return the samples of an iteration, or of the last step of a schedule.

    None if they are unknown.

    With `--step-batch-size-schedule`, Megatron sets `global_batch_size` to micro batch x DP, and does not use it
    (`validate_args`, megatron/training/arguments.py, core_v0.18.0 to 0.19.2).
    """
    steps = _steps(job)
    return steps[-1].size if steps else job.global_batch_size


def averaged_samples(job: JobArguments, consumed: int = 0) -> float | None:
    """Return how many samples an iteration averages: the mean over the steps to come of a schedule.

    None if it is unknown.

    With `--decrease-batch-size-if-needed`, each size is rounded down to a multiple of micro batch x DP (`_round`,
    megatron/core/num_microbatches_calculator.py, core_v0.16.1 and 0.19.2).
    """
    sizes = [step.size for step in sizes_to_come(job, consumed)]
    if not sizes and job.global_batch_size is not None:
        sizes = [job.global_batch_size]
    share = (job.micro_batch_size or 0) * (job.data_parallel_size or 0)
    is_rounded = share and job.decrease_batch_size_if_needed
    averaged = [size // share * share if is_rounded else size for size in sizes]
    return sum(averaged) / len(averaged) if averaged else None


def batch_divisor(job: JobArguments) -> int:
    """Return the largest divisor of the global batch and its steps to come; 0 if it is unknown.

    Megatron does not check steps that are past (`update`, in the same module as the schedules).
    """
    return math.gcd(
        global_batch_of(job) or 0, *(step.size for step in sizes_to_come(job, job.consumed_train_samples or 0))
    )


def counts_by_layout(job: JobArguments) -> bool:
    """Return whether the layout decides how many samples the iterations of flags stand for.

    With `--step-batch-size-schedule`, iterations are multiplied by micro batch x DP (`get_optimizer_param_scheduler`
    and `get_train_valid_test_num_samples`, megatron/training/training.py, 0.19.2 and the development head of August
    2026).
    """
    return bool(job.step_batch_size_schedule and job.train_iters and not job.train_samples)


def run_by(job: JobArguments, version: Version) -> JobArguments:
    """Return the arguments of a job as a release runs them, with the schedule of the batch that it has.

    core_v0.7.0 to 0.17.1 have no `--step-batch-size-schedule`; 0.18.0 and later ignore `--rampup-batch-size`
    (`_build_num_microbatches_calculator`, in the same module). A job without its schedule has the last batch at once.
    """
    ignored = ignored_schedule(job, version)
    changes: dict[str, Any] = {ignored: None, "global_batch_size": global_batch_of(job)} if ignored else {}
    return job.replace(version=version, **changes)


def with_stated_batch(stored: JobArguments, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a user states; a global batch replaces what contradicts it.

    Megatron refuses it with a schedule, and sets the batch of evaluation after it (`validate_args`,
    megatron/training/arguments.py, core_v0.18.0 to 0.19.2).
    """
    if not stated.get("global_batch_size"):
        return dict(stated)
    raw = stored.raw
    follows = raw.get("eval_global_batch_size") == stored.global_batch_size
    replaced = [SCHEDULES[1], *(["eval_global_batch_size"] if follows else [])]
    return {name: None for name in replaced if raw.get(name)} | dict(stated)


def ignored_schedule(job: JobArguments, version: Version) -> str | None:
    """Return the argument with a job's schedule of the batch, if a release does not run it."""
    ignored = SCHEDULES[RAMPS_UP_BATCH.is_of(version)]
    return ignored if job.value(ignored) else None


def _steps(job: JobArguments) -> tuple[BatchSize, ...]:
    """Return the steps of the schedule that the release of a job runs."""
    if not job.release_has(RAMPS_UP_BATCH):
        return _steps_of_schedule(job.step_batch_size_schedule or "", job.seq_length or 1)
    ramp = job.rampup_batch_size
    if not isinstance(ramp, Sequence) or len(ramp) != 3 or job.global_batch_size is None:
        return ()
    try:
        return _steps_of_ramp(*map(int, ramp), job.global_batch_size)
    except (TypeError, ValueError):
        return ()


@lru_cache(maxsize=2)
def _steps_of_schedule(schedule: str, length: int) -> tuple[BatchSize, ...]:
    """Return the steps of `--step-batch-size-schedule`, whose thresholds count tokens."""
    steps = []
    for entry in schedule.replace(",", " ").split():
        threshold, _, size = (_number(part) for part in entry.partition(":"))
        if threshold is None or size is None:
            return ()  # Megatron refuses it when it starts
        steps.append(BatchSize(threshold // length, size))
    return tuple(sorted(steps, key=lambda step: step.sample))


def _number(text: str) -> int | None:
    """Return a number with one of Megatron's suffixes; None if it is none."""
    text = text.strip().upper()
    factor = _SUFFIXES.get(text[-1:], 1)
    try:
        return int(float(text.rstrip("TBMK") if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        return None


@lru_cache(maxsize=2)  # the ramp of a checkpoint may have a million steps
def _steps_of_ramp(start: int, increment: int, samples: int, largest: int) -> tuple[BatchSize, ...]:
    """Return the steps of `--rampup-batch-size START INCREMENT SAMPLES`."""
    if not 0 < start <= largest or increment <= 0 or (largest - start) // increment > _MOST_STEPS:
        return ()
    increments = (largest - start) // increment
    each = samples / increments if increments else 0.0
    sizes = [start + number * increment for number in range(increments)] + [largest]
    return tuple(BatchSize(_first_of_step(number, each, samples), size) for number, size in enumerate(sizes))


def _first_of_step(number: int, each: float, samples: int) -> int:
    """Return the number of consumed samples from which on a step of a ramp applies.

    Megatron divides floats, `int(consumed / each)`, and may come to another integer than the exact quotient.

    Args:
        number: the number of the step.
        each: the samples of a step.
        samples: those of the ramp, after which the last step applies in any case.
    """
    first = math.ceil(number * each)
    while first and each and int((first - 1) / each) >= number:
        first -= 1
    while each and first <= samples and int(first / each) < number:
        first += 1
    return first
