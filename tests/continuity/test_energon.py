"""Test which layouts can take up the states of Energon's data loader."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_ckpt_ext.continuity.data_order import data_order
from mcore_ckpt_ext.continuity.energon import LoaderSizes, fitting_workers
from mcore_ckpt_ext.continuity.order_change import CHANGES, EACH_ONCE, SAME_ORDER, UNKNOWN, DataOrder
from mcore_ckpt_ext.job.job_arguments import JobArguments

_JOB = {
    "dataloader_type": "external", "dataloader_save": "states", "data_parallel_size": 4, "num_workers": 2,
    "micro_batch_size": 2, "global_batch_size": 48, "consumed_train_samples": 480, "seq_length": 4096,
}  # fmt: skip


def _account(changes: dict[str, Any], **written: Any) -> DataOrder:
    base = JobArguments.of({**_JOB, **written})
    return data_order(base, base.replace(**changes))


@pytest.mark.parametrize("changes", [{}, {"seq_length": 8192}, {"pipeline_model_parallel_size": 4}])
def test_what_the_states_do_not_depend_on(changes: dict[str, Any]) -> None:
    order = _account(changes)
    assert (order.verdict, order.note, order.read_again, order.never_read) == (SAME_ORDER, "", 0, 0)


@pytest.mark.parametrize(("size", "workers"), [(1, 8), (2, 4), (8, 1)])
def test_as_many_workers_in_all_read_each_sample_once(size: int, workers: int) -> None:
    order = _account({"data_parallel_size": size, "num_workers": workers})
    assert (order.verdict, order.goes_on, order.is_remarkable, order.never_read) == (EACH_ONCE, True, True, 0)
    assert order.sentence == (
        "data: goes on at sample 480, each sample once; Energon's states of DP4 with --num-workers 2 are redistributed "
        f"to DP{size} with --num-workers {workers}"
    )


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"data_parallel_size": 2}, "--num-workers 4"),
        ({"data_parallel_size": 8}, "--num-workers 1"),
        ({"num_workers": 4}, "--num-workers 2"),
        ({"data_parallel_size": 3}, "DP1 with --num-workers 8, or DP2 with --num-workers 4, or DP4 with --num-workers "
                                    "2, or DP8 with --num-workers 1"),
        ({"micro_batch_size": 4}, "--micro-batch-size 2"),
        ({"num_workers": 0}, "--num-workers 2"),
    ],
)  # fmt: skip
def test_other_numbers_of_workers_or_larger_batches_are_changes(changes: dict[str, Any], hint: str) -> None:
    order = _account(changes)
    assert (order.verdict, order.goes_on, order.is_remarkable, order.read_again) == (CHANGES, False, True, None)
    assert order.hint == hint


def test_a_smaller_batch_that_divides_the_old_one_is_taken_up_by_workers_only() -> None:
    order = _account({"micro_batch_size": 1})
    assert (order.verdict, order.note) == (EACH_ONCE, "Energon's states are taken up with micro batch 1, before 2")
    assert _account({"micro_batch_size": 1}, num_workers=0).verdict == CHANGES


def test_a_rank_without_workers_has_a_state_that_no_other_can_take_up() -> None:
    assert _account({}, num_workers=0).verdict == SAME_ORDER
    order = _account({"data_parallel_size": 2}, num_workers=0)
    assert (order.verdict, order.hint) == (CHANGES, "DP4 with --num-workers 0")


def test_sizes_that_are_not_recorded_are_unknown() -> None:
    assert _account({}, num_workers=None).verdict == UNKNOWN
    assert _account({"dataloader_save": None}).verdict == UNKNOWN


@pytest.mark.parametrize("data_parallel", range(1, 20))
def test_the_named_flags_fit(data_parallel: int) -> None:
    saved = LoaderSizes(6, 2, 1)
    text = fitting_workers(saved, data_parallel)
    for option in text.split(", or "):
        size, _, workers = option.rpartition("--num-workers ")
        named = int(size.removeprefix("DP").split(" ")[0]) if size else data_parallel
        assert LoaderSizes(named, int(workers), 1).takes_workers_of(saved), option
