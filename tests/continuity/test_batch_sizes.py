"""Test which batch sizes of a schedule are still to come, against Megatron's own calculators."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from mcore_ckpt_ext.continuity.batch_sizes import (
    BatchSize,
    batch_divisor,
    global_batch_of,
    indivisible_sizes,
    run_by,
    sizes_to_come,
    with_stated_batch,
)
from mcore_ckpt_ext.continuity.sizes import GLOBAL_BATCH, sizes_of_job
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.versions import Version


def _job(**more: Any) -> JobArguments:
    return JobArguments.of({"micro_batch_size": 2, "data_parallel_size": 4, "global_batch_size": 64, **more})


@pytest.mark.parametrize("schedule", ["0:8 1K:16 2.5K:24", "0:8,  0.001M:16 2500:24"])
@pytest.mark.parametrize("length", [1, 10])
def test_the_steps_are_megatrons(schedule: str, length: int) -> None:
    megatron = StepBatchsizeNumMicroBatchesCalculator(2, 4, False, 1, schedule, length)
    job = _job(step_batch_size_schedule=schedule, seq_length=length)
    for consumed in (0, 99, 100, 101, 249, 250, 999, 1000, 2499, 2500, 9999):
        megatron.update(consumed, consistency_check=False)
        assert sizes_to_come(job, consumed)[0].size == megatron.get_current_global_batch_size()


def test_the_global_batch_is_the_last_of_a_schedule() -> None:
    """Megatron derives the argument from the layout, and does not use it."""
    job = _job(step_batch_size_schedule="0:8 1K:16 2.5K:24", global_batch_size=8)
    assert (global_batch_of(job), batch_divisor(job)) == (24, 8)
    assert sizes_to_come(job, 1500) == [BatchSize(1500, 16), BatchSize(2500, 24)]
    moved = job.replace(data_parallel_size=2, global_batch_size=4)
    assert sizes_of_job(moved)[GLOBAL_BATCH] == sizes_of_job(job)[GLOBAL_BATCH] == 16
    assert (global_batch_of(_job()), batch_divisor(_job())) == (64, 64)


@pytest.mark.parametrize("more", [{"global_batch_size": 24}, {"rampup_batch_size": [16, 8, 300]}])
def test_a_decreased_batch_is_another_one(more: dict[str, Any]) -> None:
    """Of 24 samples, data parallelism of 8 in place of 4 leaves 16, at once or in a step of the ramp."""
    job = _job(decrease_batch_size_if_needed=True, **more)
    sizes = [sizes_of_job(job.replace(data_parallel_size=ranks))[GLOBAL_BATCH] for ranks in (2, 4, 8)]
    assert sizes[0] == sizes[1] != sizes[2]


def test_a_ramp() -> None:
    job = _job(rampup_batch_size=["16", "16", "300"])
    assert [(step.sample, step.size) for step in sizes_to_come(job, 0)] == [(0, 16), (100, 32), (200, 48), (300, 64)]
    assert [step.size for step in sizes_to_come(job, 250)] == [48, 64]
    assert indivisible_sizes(job, 0) == []
    other = job.replace(data_parallel_size=8)
    assert [step.size for step in indivisible_sizes(other, 0)] == []
    assert [step.size for step in indivisible_sizes(job.replace(data_parallel_size=12), 0)] == [16, 32, 64]
    assert [step.size for step in indivisible_sizes(job.replace(data_parallel_size=12), 250)] == [64]


@pytest.mark.parametrize(("ramp", "largest"), [((16, 16, 300), 64), ((2, 2, 49), 100), ((1, 3, 7), 64)])
def test_the_steps_of_a_ramp_are_megatrons(ramp: tuple[int, int, int], largest: int) -> None:
    """`RampupBatchsizeNumMicroBatchesCalculator.update` of core_v0.16.1: the last step is due at the end itself."""
    start, increment, samples = ramp
    each = samples / ((largest - start) // increment)
    job = _job(rampup_batch_size=list(ramp), global_batch_size=largest)
    for consumed in range(samples + 3):
        due = largest if consumed > samples else start + int(consumed / each) * increment
        assert sizes_to_come(job, consumed)[0] == BatchSize(consumed, due)


def test_a_step_that_is_past_binds_no_layout() -> None:
    job = _job(rampup_batch_size=[16, 16, 300], consumed_train_samples=200)
    assert (batch_divisor(job.replace(consumed_train_samples=0)), batch_divisor(job)) == (16, 16)
    assert batch_divisor(job.replace(consumed_train_samples=300)) == 64
    assert sizes_of_job(job, 300)[GLOBAL_BATCH] == 64 != sizes_of_job(job)[GLOBAL_BATCH]


def test_releases_that_ignore_a_ramp_have_no_steps() -> None:
    """0.18 takes the flag: `_build_num_microbatches_calculator` has no calculator for it."""
    job = _job(rampup_batch_size=[16, 16, 300])
    assert sizes_to_come(job.replace(step_batch_size_schedule=None), 0) == []
    assert sizes_to_come(run_by(job, Version(0, 18)), 0) == []
    assert sizes_to_come(run_by(job, Version(0, 17)), 0) == sizes_to_come(job, 0)


def test_an_older_release_runs_a_ramp_whatever_saved_the_checkpoint() -> None:
    job = _job(rampup_batch_size=[16, 16, 300], step_batch_size_schedule=None)
    assert [step.size for step in sizes_to_come(run_by(job, Version(0, 17)), 0)] == [16, 32, 48, 64]


def test_an_older_release_has_no_schedule() -> None:
    """0.17 has no such flag, so the last batch is the one to state."""
    job = run_by(_job(step_batch_size_schedule="0:8 1K:24", global_batch_size=8), Version(0, 17))
    assert (sizes_to_come(job, 0), global_batch_of(job), job.step_batch_size_schedule) == ([], 24, None)


def test_a_stated_batch_replaces_a_stored_schedule() -> None:
    stored = _job(step_batch_size_schedule="0:8 1K:24", global_batch_size=8)
    assert with_stated_batch(stored, {"global_batch_size": 12}) == {
        "global_batch_size": 12,
        "step_batch_size_schedule": None,
    }
    for stated in ({"lr": 1.0}, {"global_batch_size": 12, "step_batch_size_schedule": "0:12"}):
        assert with_stated_batch(stored, stated) == stated
    assert with_stated_batch(_job(), {"global_batch_size": 12}) == {"global_batch_size": 12}


def test_decreasing_a_batch_size_needs_one_micro_batch() -> None:
    job = _job(rampup_batch_size=[16, 16, 300], data_parallel_size=12, decrease_batch_size_if_needed=True)
    assert [step.size for step in indivisible_sizes(job, 0)] == [16]


@pytest.mark.parametrize(
    "values",
    [
        {}, {"step_batch_size_schedule": "x:y"}, {"rampup_batch_size": [1, 2]}, {"rampup_batch_size": ["a", 1, 1]},
        {"rampup_batch_size": [16, 0, 300]}, {"rampup_batch_size": [128, 16, 300]},
    ],
)  # fmt: skip
def test_what_megatron_itself_refuses_has_no_steps(values: dict[str, Any]) -> None:
    assert sizes_to_come(_job(**values), 0) == []
