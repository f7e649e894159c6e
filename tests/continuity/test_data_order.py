"""Test the account of the order of the data: what determines it, and what a resume makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_ckpt_ext.continuity.data_files import RECORD, DataFiles
from mcore_ckpt_ext.continuity.data_order import DETERMINANTS, data_order
from mcore_ckpt_ext.continuity.order_change import CHANGES, SAME_ORDER, UNKNOWN
from mcore_ckpt_ext.job.arguments.table import ROWS
from mcore_ckpt_ext.job.job_arguments import JobArguments

_BASE: dict[str, Any] = {
    "dataloader_type": "single", "data_sharding": True, "data_parallel_size": 8, "micro_batch_size": 1,
    "global_batch_size": 48, "train_iters": 1000, "train_samples": None, "consumed_train_samples": 4800,
    "consumed_valid_samples": 0, "iteration": 100, "seed": 1234, "seq_length": 4096, "split": "99,1,0",
    "data_path": ["0.3", "/data/a_text_document", "0.7", "/data/b_text_document"], "mock_data": False,
    "num_workers": 2,
}  # fmt: skip


def _account(changes: dict[str, Any], **written: Any) -> Any:
    base = JobArguments.of({**_BASE, **written})
    return data_order(base, base.replace(**changes))


@pytest.mark.parametrize("loader", ["single", "cyclic", None])
@pytest.mark.parametrize("changes", [{}, {"data_parallel_size": 4}, {"micro_batch_size": 3}, {"num_workers": 7}])
def test_layout_batch_and_workers_keep_the_order(loader: str | None, changes: dict[str, Any]) -> None:
    order = _account(changes, dataloader_type=loader)
    assert (order.verdict, order.sample, order.read_again, order.never_read) == (SAME_ORDER, 4800, 0, 0)
    assert order.sentence.startswith("data: goes on at sample 4,800, same order")
    has_note = loader == "cyclic" and ("data_parallel_size" in changes or "micro_batch_size" in changes)
    assert bool(order.note) is order.is_remarkable is has_note


@pytest.mark.parametrize(
    ("changes", "verdict", "text"),
    [
        ({"seed": 1}, CHANGES, "--seed was 1234, is 1"),
        ({"seq_length": 8192}, CHANGES, "--seq-length was 4096, is 8192"),
        ({"split": "98,2,0"}, CHANGES, "--split was 99,1,0, is 98,2,0"),
        ({"dataloader_type": "cyclic"}, CHANGES, "--dataloader-type was single, is cyclic"),
        ({"mock_data": True}, CHANGES, "--mock-data was not set, is True"),
        ({"data_path": ["0.3", "/new/a_text_document", "0.7", "/new/b_text_document"]}, UNKNOWN, "only lie in another"),
        ({"data_path": ["0.5", "/data/a_text_document", "0.5", "/data/b_text_document"]}, CHANGES, "mixed otherwise"),
        ({"train_iters": 2000}, UNKNOWN, "built for 96,000 samples, before for 48,000"),
        ({"global_batch_size": 96, "train_iters": 500}, SAME_ORDER, "same order"),
        ({"train_samples": 50000}, UNKNOWN, "as many passes"),
        ({"dataloader_type": "external"}, CHANGES, "is external"),
    ],
)  # fmt: skip
def test_what_else_changes_the_order(changes: dict[str, Any], verdict: str, text: str) -> None:
    order = _account(changes)
    assert order.verdict == verdict
    assert text in order.sentence
    if verdict != SAME_ORDER:
        assert order.is_remarkable
        assert not order.goes_on
        assert order.hint
        assert order.read_again is None


def test_stock_megatron_reads_samples_again_and_never_that_this_package_reads_once() -> None:
    written = JobArguments.of({**_BASE, "dataloader_type": "cyclic"})
    order = data_order(written, written.replace(data_parallel_size=4), 9600)
    assert (order.read_again, order.never_read) == (0, 0)
    assert order.sentence.endswith("; stock Megatron would read 2,404 of the samples again and 2,404 never")
    stops = data_order(written, written.replace(data_parallel_size=7), 9600)
    assert stops.sentence.endswith("; stock: the sampler stops at its first batch")


def test_why_the_counts_are_not_known() -> None:
    assert _account({"seed": 1}).sentence.endswith(
        "; how many samples are read again or never is not known: no checkpoint has the index from which the orders "
        "are drawn"
    )
    phases = _account({"data_parallel_size": 4}, dataloader_type="cyclic", phase_transition_iterations="50")
    assert phases.uncounted == "Megatron counts the position from the last transition"


def test_what_one_of_the_releases_does_not_have_is_not_compared() -> None:
    written = JobArguments.of({name: value for name, value in _BASE.items() if name != "seed"})
    assert data_order(written, JobArguments.of(_BASE)).goes_on


def test_loaders_of_ones_own() -> None:
    unknown = _account({}, dataloader_type="external")
    assert (unknown.verdict, unknown.is_remarkable) == (UNKNOWN, False)
    assert _account({"data_parallel_size": 4}, dataloader_type="external").is_remarkable


def test_a_checkpoint_that_does_not_describe_its_data_is_unknown() -> None:
    written = JobArguments.of({"num_layers": 4}, is_complete=False)
    order = data_order(written, JobArguments.of(_BASE))
    assert (order.verdict, order.sample, order.is_remarkable) == (UNKNOWN, None, False)


def test_a_position_that_is_not_recorded_follows_from_the_iteration() -> None:
    assert _account({}, consumed_train_samples=0).sample == 4800


def test_a_layout_that_does_not_divide_a_batch_size_to_come() -> None:
    order = _account({"data_parallel_size": 6}, step_batch_size_schedule="0:48 40M:64 80M:96", global_batch_size=None)
    assert [(one.sample, one.size) for one in order.indivisible] == [(9765, 64)]
    assert (order.verdict, order.goes_on) == (SAME_ORDER, False)
    assert "training will stop at sample 9,765" in order.sentence
    assert "global batch size 64" in order.sentence


def test_a_ramp_that_the_release_ignores_is_named() -> None:
    """0.18 takes the flag without an effect, and a resume under the same layout would else say nothing."""
    written = JobArguments.of({**_BASE, "rampup_batch_size": [16, 16, 9600], "consumed_train_samples": 4800})
    ignoring = written.replace(step_batch_size_schedule=None)
    order = data_order(written, ignoring)
    assert order.verdict == SAME_ORDER and order.is_remarkable
    assert order.sentence.endswith("; this Megatron ignores --rampup-batch-size: the global batch is 48 at once")
    for before, now in (
        (written, written),
        (ignoring, ignoring),
        (written.replace(consumed_train_samples=9600), ignoring),
    ):
        assert not data_order(before, now).is_remarkable


_WEIGHTED = ["0.3", "/data/a", "0.7", "/data/b"]


@pytest.mark.parametrize(
    ("written", "changes"),
    [
        ({"data_path": _WEIGHTED}, {"data_path": ["3", "/data/a", "7.0", "/data/b"]}),
        ({"split": "969, 30, 1"}, {"split": "969,30,1"}),
        ({"split": "90,10,0"}, {"split": "0.9,0.05,0.05"}),
        ({"sft": True}, {"seed": 7}),
        ({"sft": True}, {"train_iters": 2000}),
        ({"data_path": ["/data/a", "/data/b", "/data/c"]}, {"train_iters": 2000}),
        ({"data_path": ["/data/a"], "mid_level_dataset_surplus": 0.005}, {"mid_level_dataset_surplus": 0.5}),
    ],
)
def test_what_megatron_does_not_distinguish_keeps_the_order(written: dict[str, Any], changes: dict[str, Any]) -> None:
    """The builder of 0.19.2 gave the same samples for such blends and splits; `SFTDataset` was read in its source."""
    order = _account(changes, **written)
    assert (order.verdict, order.is_remarkable) == (SAME_ORDER, False)


@pytest.mark.parametrize("written", [{"sft": True}, {"data_path": _WEIGHTED}, {"data_path": ["/data/a", "/data/b"]}])
def test_a_random_sampler_draws_from_as_many_samples_as_a_blend_has(written: dict[str, Any]) -> None:
    """They are as many as the data set is built for, so that another number is another order, in one pass as well."""
    order = _account({"train_iters": 2000}, dataloader_type="cyclic", **written)
    assert order.verdict == (UNKNOWN if written == {"data_path": ["/data/a", "/data/b"]} else CHANGES)
    assert "the random sampler draws from another number of samples" in order.sentence


@pytest.mark.parametrize("split", ["", "0,0,0", "a", ".", "1..2"])
def test_a_split_that_megatron_refuses_is_compared_as_it_is(split: str) -> None:
    assert _account({"split": "99,1,0"}, split=split).verdict == CHANGES
    assert _account({}, split=split).goes_on


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_blend_without_weights_may_only_lie_in_another_place(names: list[str]) -> None:
    """Paths alone are a blend, too: under other folders they may be the same, in another order they are not."""
    old = [f"/data/{name}" for name in names]
    moved = _account({"data_path": [f"/new/{name}" for name in names]}, data_path=old)
    assert (moved.verdict, "only lie in another" in moved.sentence) == (UNKNOWN, True)
    other = _account({"data_path": [f"/new/other_{name}" for name in names]}, data_path=old)
    assert other.verdict == CHANGES


def _files(words: list[str], sizes: list[int]) -> dict[str, Any]:
    return {RECORD: DataFiles(tuple(words), tuple(sizes)).as_argument()}


_OF_FILE: dict[str, Any] = {"data_path": None, "data_args_path": "blend.txt", "per_split_data_args_path": None}
_MIXED = ["0.3", "/data/a", "0.7", "/data/b"]
_MOVED = ["0.3", "/new/a", "0.7", "/new/b"]


@pytest.mark.parametrize(
    ("changes", "verdict", "text"),
    [
        ({}, SAME_ORDER, ""),
        (_files(["3", "/data/a", "7", "/data/b"], [10, 20]), SAME_ORDER, ""),
        (_files(_MOVED, [10, 20]), SAME_ORDER, ""),
        (_files(_MOVED, []), UNKNOWN, "otherwise"),
        (_files(["0.5", "/data/a", "0.5", "/data/b"], [10, 20]), CHANGES,
         "--data-args-path was 0.3 /data/a 0.7 /data/b, is 0.5 /data/a 0.5 /data/b: the data sets are mixed otherwise"),
        (_files(_MIXED, [10, 1021]), CHANGES, "(/data/b has 1,021 bytes, before 20: its documents are others"),
        (_files(_MIXED, [10, 21]) | {"data_args_path": "other.txt"}, CHANGES, "/data/b has 21 bytes, before 20"),
        (_files(_MIXED, [10, 20]) | {"data_args_path": "other.txt"}, SAME_ORDER, ""),
        ({RECORD: {"words": 3, "sizes": ["10"]}, "data_args_path": "other.txt"}, UNKNOWN, "the file may mix"),
        ({RECORD: None}, SAME_ORDER, ""),
        (_files([], [10, 20]) | {"data_args_path": None, "data_path": _MIXED}, SAME_ORDER, ""),
        (_files([], [10, 20]) | {"data_args_path": None, "data_path": _MOVED}, SAME_ORDER, ""),
        (_files(_MIXED, [10, 20]) | {"data_args_path": None, "per_split_data_args_path": "splits.json"}, UNKNOWN,
         "the file may mix"),
    ],
)  # fmt: skip
def test_what_the_files_contained_is_compared(changes: dict[str, Any], verdict: str, text: str) -> None:
    order = _account(changes, **_OF_FILE, **_files(_MIXED, [10, 20]))
    assert order.verdict == verdict
    assert text in order.sentence


def test_data_sets_of_the_same_sizes_only_lie_in_another_place() -> None:
    order = _account({"data_path": _MOVED}, data_path=_MIXED, **_files([], [10, 20]))
    assert order.verdict == SAME_ORDER


def test_every_determinant_is_an_argument_with_a_source() -> None:
    of_loaders = {"mid_level_dataset_surplus", "data_path", "train_data_path", "data_args_path", "mock_data", "sft",
                  "per_split_data_args_path", "per_dataset_sequences_path", "fim_data", "split"}  # fmt: skip
    for row in DETERMINANTS:
        assert row.source.endswith((".py", "`", "later")), row
        assert {*row.arguments} <= {*ROWS, *of_loaders}, row
