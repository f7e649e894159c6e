"""Test that an epoch goes on in its order under other layouts, against Megatron's own random sampler."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler

from mcore_ckpt_ext.continuity.cyclic import HISTORY, ReadingLayout, as_argument, history_of
from mcore_ckpt_ext.continuity.data_order import changed_history, followed_history
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.megatron.cyclic_sampler import DataHistory, keep_history
from mcore_ckpt_ext.patching.singletons import PROCESS


def _job(data: int, micro: int, *, sharded: bool = True, consumed: int = 0, **more: Any) -> JobArguments:
    return JobArguments.of({
        "dataloader_type": "cyclic", "data_parallel_size": data, "micro_batch_size": micro, "data_sharding": sharded,
        "consumed_train_samples": consumed, "consumed_valid_samples": 0, "global_batch_size": 24, **more,
    })  # fmt: skip


def _steps(job: JobArguments, samples: int, consumed: int, epochs: int) -> list[list[int]]:
    """What all ranks of a job read in each step, for the rest of the epoch and the following ones, by its samplers."""
    data, micro = job.data_parallel_size, job.micro_batch_size
    assert data is not None and micro is not None
    ranks = [
        MegatronPretrainingRandomSampler(
            SimpleNamespace(split=SimpleNamespace(name="train")), samples, consumed, micro, rank, data,
            job.data_sharding is not False,
        )
        for rank in range(data)
    ]  # fmt: skip
    # Without data sharding, Megatron's first ranks read one more batch where their samples do not fill the last step.
    return [[sample for batch in step for sample in batch] for _ in range(epochs) for step in zip(*ranks, strict=False)]


class _Run:
    """A run through several jobs, whose checkpoints carry the history."""

    def __init__(self, samples: int) -> None:
        self.samples, self.consumed = samples, 0
        self.read: list[int] = []
        self._written: JobArguments | None = None

    def train(self, job: JobArguments, until: int | None) -> None:
        """Read up to a number of samples, or to the end of the epoch, and save."""
        arguments = SimpleNamespace(**job.raw)
        keep_history(() if self._written is None else followed_history(self._written, job), arguments)
        for step in _steps(job, self.samples, self.consumed, 1):
            if until is not None and self.consumed >= until:
                break
            self.read += step
            self.consumed += len(step)
        self._written = JobArguments.of({**vars(arguments), "consumed_train_samples": self.consumed})

    def convert(self, job: JobArguments) -> None:
        """Write the checkpoint as that of a job that reads otherwise."""
        assert self._written is not None
        converted = job.replace(consumed_train_samples=self.consumed)
        self._written = converted.replace(**changed_history(self._written, converted))


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    PROCESS.one(DataHistory).layouts = ()


LAYOUTS = [(8, 1), (4, 2), (2, 3), (6, 1), (1, 4)]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("samples", [96, 101])
def test_every_sample_of_an_epoch_is_read_once_through_changes_of_layout(samples: int, sharded: bool) -> None:
    for first, second, third in product(LAYOUTS, repeat=3):
        run = _Run(samples)
        for (data, micro), until in zip((first, second, third), (24, 48, None), strict=True):
            run.train(_job(data, micro, sharded=sharded), until)
        assert max(Counter(run.read).values()) == 1, (first, second, third)
        lost = samples - len(run.read)
        assert lost < third[0] * third[1], "only what fills no batch is left out, as by Megatron"


@pytest.mark.parametrize("sharded", [True, False])
def test_the_epoch_has_the_same_global_batches_as_without_a_change(sharded: bool) -> None:
    run, alone = _Run(480), _Run(480)
    alone.train(_job(8, 1, sharded=sharded), None)
    for (data, micro), until in (((8, 1), 96), ((4, 1), 192), ((4, 2), 288), ((2, 3), 384), ((8, 1), None)):
        run.train(_job(data, micro, sharded=sharded), until)
    batches = [[set(read[at : at + 24]) for at in range(0, 480, 24)] for read in (run.read, alone.read)]
    assert batches[0] == batches[1]


@pytest.mark.parametrize("sharded", [True, False])
def test_the_next_epochs_are_megatrons_own_under_the_new_layout(sharded: bool) -> None:
    run, old, new = _Run(485), _job(7, 1, sharded=sharded), _job(6, 2, sharded=sharded)
    run.train(old, None)
    run.train(old, 483 + 120)
    run.train(new, None)
    assert run.consumed == 957, "the epoch ends where the new layout lets it end"
    after = _steps(new, 485, 957, 2)  # the history is still kept in this process
    PROCESS.one(DataHistory).layouts = ()
    assert after == _steps(new, 485, 2 * 480, 2)
    assert len(after) == 2 * 40


def test_a_position_that_the_new_step_does_not_divide_is_served() -> None:
    run = _Run(480)
    run.train(_job(4, 1), 100)
    with pytest.raises(AssertionError):
        _steps(_job(8, 2), 480, 100, 1)  # stock Megatron
    run.train(_job(8, 2), None)
    assert max(Counter(run.read).values()) == 1
    assert len(run.read) == 100 + 380 // 16 * 16


@pytest.mark.parametrize("data", [4, 2])
def test_an_epoch_goes_on_after_a_conversion(data: int) -> None:
    """To the layout of the job that resumes, and to one that nobody resumes under."""
    run = _Run(480)
    run.train(_job(8, 1), 96)
    run.convert(_job(4, 1))
    run.train(_job(data, 2), None)
    assert sorted(run.read) == list(range(480))


def test_an_epoch_after_several_is_found() -> None:
    run = _Run(480)
    for _ in range(3):
        run.train(_job(8, 1), None)
    run.read.clear()
    run.train(_job(8, 1), 1440 + 48)
    run.train(_job(5, 2), None)
    assert max(Counter(run.read).values()) == 1
    assert len(run.read) == 48 + 430


def test_a_layout_that_reads_nothing_leaves_no_trace() -> None:
    first, second = _job(8, 1, consumed=96), _job(4, 1)
    history = history_of(first, second)
    saved = second.replace(consumed_train_samples=96, **{HISTORY: as_argument(history)})
    back = history_of(saved, _job(8, 1))
    assert [str(one) for one in history] == ["DP8 with micro batch 1", "DP4 with micro batch 1"]
    assert as_argument(back) is None
    assert as_argument(history_of(_job(8, 1), _job(4, 1))) is None, "nothing was read before the change"


def test_what_no_job_records_counts_as_nothing() -> None:
    job = _job(8, 1, consumed=96)
    entry = {**(as_argument(history_of(job, _job(4, 1))) or [])[0]}
    for recorded in (
        "text",
        [7],
        [{}],
        [{**entry, "micro_batch": 0}],
        [{**entry, "sample": -1}],
        [{**entry, "sample": True}],
    ):
        assert len(history_of(job.replace(**{HISTORY: recorded}), _job(8, 1))) == 1


def test_samplers_of_other_data_keep_megatrons_order() -> None:
    layouts = [ReadingLayout(0, 0, 8, 1, 1, True), ReadingLayout(96, 48, 4, 1, 1, True)]
    history = DataHistory()
    history.layouts = tuple(layouts)

    def sampler(position: int, **dataset: Any) -> Any:
        return SimpleNamespace(dataset=SimpleNamespace(**dataset), consumed_samples=position)

    split = {name: {"split": SimpleNamespace(name=name)} for name in ("train", "valid", "test")}
    assert history.of(sampler(96, **split["train"])) == history.layouts
    assert [one.sample for one in history.of(sampler(48, **split["valid"]))] == [0, 48]
    assert history.of(sampler(0, **split["test"])) == ()
    assert history.of(sampler(96)) == history.layouts
    assert history.of(sampler(0)) == ()
    for earlier, later in pairwise(history.layouts):
        assert earlier.sample < later.sample
