"""Test that genuine jobs with Energon read each sample once through changes of layout, and say where they cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from tests.harness.jobs import LAST, RANK_SCRIPTS, SAVED
from tests.harness.layouts import BATCH, Layout
from tests.harness.packages import energon
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

_BETWEEN = 6
_SAMPLES = 2 * BATCH * LAST  # the next epoch does not begin: shuffling mixes the end of one with the begin of another
_DP4 = Layout(1, 1, 4)
_STAGES = Layout(1, 2, 4)
_TP2 = Layout(2, 1, 4)
_DP8 = Layout(1, 1, 8)
_PAIRS = Layout(2, 1, 8)
_WORKERS = 8  # of all ranks


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("energon")


def _turn(
    base: Path, name: str, layout: Layout, workers: int, load: str = "", required: bool = False, **options: Any
) -> Turn:
    place = base / name
    (place / "samples").mkdir(parents=True)
    environment = {"TEST_SAMPLES": str(place / "samples"), "MCORE_CKPT_EXT_EXPLAIN": "1"}
    if required:
        environment["MCORE_CKPT_EXT_DATA_ORDER"] = "required"
    more = ["--dataloader-type", "external", "--num-workers", str(workers), "--micro-batch-size", "1"]
    more += ["--dataloader-save", str(base / "loader")]
    run = base / load / "checkpoints" if load else None
    return Turn(place, layout, load=run, more=more, environment=environment, **options)


@pytest.fixture(scope="module")
def results(base: Path) -> Results:
    """A job without interruption, the same under DP4, PP2 x DP2, and TP2 x DP2 or DP4, and two that do not fit."""
    make = [sys.executable, str(RANK_SCRIPTS / "make_webdataset.py"), str(base / "data"), str(_SAMPLES), str(_WORKERS)]
    subprocess.run(make, check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(energon())})
    turns = [
        _turn(base, "first", _DP4, 2, saves=True, until=LAST),
        _turn(base, "refused", _TP2, 2, load="first", required=True),
        _turn(base, "second", _STAGES, 4, load="first", saves=True, until=_BETWEEN, newest=_BETWEEN, required=True),
        _turn(base, "third", _TP2, 4, load="second", until=LAST, required=True),
        _turn(base, "unchanged", _STAGES, 4, load="second", until=LAST, required=True),
        _turn(base, "more", _DP4, 2, load="second", until=LAST, required=True),
        _turn(base, "more, refused", _DP4, 4, load="second", required=True),
    ]
    return run_in_turn(base, turns, [RANK_SCRIPTS / "energon_loader.py"])


@pytest.fixture(scope="module")
def twice_as_many(base: Path, results: Results) -> Results:
    """The first job under DP8, and under DP8 with too many workers; and a job of its own under DP8, DP4, and DP8."""
    results.job("first")
    own = base / "eight"
    turns = [
        _turn(own, "eight", _DP8, 1, saves=True, until=LAST),
        _turn(own, "four", _PAIRS, 2, load="eight", saves=True, until=_BETWEEN, newest=_BETWEEN, required=True),
        _turn(own, "eight again", _DP8, 1, load="four", until=LAST, required=True),
        _turn(base, "DP8", _DP8, 1, load="first", until=LAST, required=True),
        _turn(base, "DP8, refused", _DP8, 2, load="first", required=True),
    ]
    return run_in_turn(base, turns, [RANK_SCRIPTS / "energon_loader.py"])


@pytest.fixture(scope="module", autouse=True)
def variables(base: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_ENERGON", str(energon()))
        patch.setenv("TEST_WEBDATASET", str(base / "data"))
        yield


def _batches(results: Results, name: str) -> list[list[int]]:
    """The samples of each iteration of a job, in the order of its ranks."""
    files = sorted((results.folder(name) / "samples").glob("*.jsonl"))
    ranks = [[sample for line in path.read_text().splitlines() for sample in json.loads(line)] for path in files]
    each = BATCH // len(ranks)
    iterations = range(0, len(ranks[0]), each)
    return [[sample for read in ranks for sample in read[start : start + each]] for start in iterations]


def _check_read_once(alone: list[list[int]], parts: list[list[int]]) -> None:
    """Check that the iterations of several jobs read each sample of the job without interruption once."""
    read = sum(parts, [])
    assert len(set(read)) == len(read)
    assert set(read) == set(sum(alone, []))


def test_the_samples_are_those_of_the_job_without_interruption(results: Results) -> None:
    alone, second, third = (_batches(results, name) for name in ("first", "second", "third"))
    assert list(map(len, (alone, second, third))) == [LAST, _BETWEEN - SAVED, LAST - _BETWEEN]
    _check_read_once(alone, alone[:SAVED] + second + third)


def test_more_ranks_read_on_where_fewer_stopped(results: Results) -> None:
    alone, second, more = (_batches(results, name) for name in ("first", "second", "more"))
    _check_read_once(alone, alone[:SAVED] + second + more)
    assert "of DP2 with --num-workers 4 are redistributed to DP4 with --num-workers 2" in results.job("more").output


def test_twice_as_many_ranks_read_on_where_the_first_stopped(results: Results, twice_as_many: Results) -> None:
    alone, rest = _batches(results, "first"), _batches(twice_as_many, "DP8")
    assert list(map(len, rest)) == [BATCH] * (LAST - SAVED)
    _check_read_once(alone, alone[:SAVED] + rest)
    output = twice_as_many.job("DP8").output
    assert "of DP4 with --num-workers 2 are redistributed to DP8 with --num-workers 1" in output
    assert "hint: --num-workers 1" in twice_as_many["DP8, refused"].output


def test_eight_ranks_read_on_where_four_stopped_that_read_on_where_eight_stopped(twice_as_many: Results) -> None:
    alone, four, again = (_batches(twice_as_many, name) for name in ("eight", "four", "eight again"))
    assert list(map(len, (alone, four, again))) == [LAST, _BETWEEN - SAVED, LAST - _BETWEEN]
    _check_read_once(alone, alone[:SAVED] + four + again)
    output = twice_as_many.job("eight again").output
    assert "of DP4 with --num-workers 2 are redistributed to DP8 with --num-workers 1" in output


def test_the_other_folder_of_a_job_without_stages_changes_no_order(results: Results) -> None:
    assert _batches(results, "third") == _batches(results, "unchanged")
    assert "same order" in results.job("third").summary.string
    assert "energon_dp2" not in results.job("unchanged").output


def test_the_summary_says_what_was_redistributed(results: Results) -> None:
    assert (
        "data: goes on at sample 32, each sample once; Energon's states of DP4 with --num-workers 2 are redistributed "
        "to DP2 with --num-workers 4"
    ) in results.job("second").summary.string


def _plain(node: Any) -> Any:
    """A state without classes, which can be compared."""
    if is_dataclass(node):
        return {field.name: _plain(getattr(node, field.name)) for field in fields(node)}
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_plain(value) for value in node]
    return node.tolist() if hasattr(node, "tolist") else node


def test_the_states_are_those_of_the_tool_of_energon(
    results: Results, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results.job("second")
    saved = sorted((base / "loader" / "iter_0000004" / "mp_rank_00").iterdir())
    assert len(saved) == 4, "the saved states are as they were"
    (base / "tool").mkdir()  # it has to exist
    command = [sys.executable, "-m", "megatron.energon.tools.checkpoint", "redist", "--new-world-size", "2"]
    environment = {**os.environ, "PYTHONPATH": str(energon())}
    subprocess.run([*command, *map(str, saved), str(base / "tool")], check=True, timeout=120, env=environment)
    monkeypatch.syspath_prepend(str(energon()))
    expected = sorted((base / "tool").iterdir())
    found = sorted((base / "loader" / "energon_dp2" / "iter_0000004" / "mp_rank_00_000").iterdir())
    assert [path.name for path in found] == [path.name for path in expected]
    for pair in zip(found, expected, strict=True):
        one, other = (_plain(torch.load(path, weights_only=False)) for path in pair)
        assert len(one["dataloader_state_dict"]["worker_states"]) == 4
        assert one == other


def test_later_states_are_saved_where_the_user_asked(results: Results, base: Path) -> None:
    results.job("third")
    assert len(list((base / "loader" / "iter_0000006" / "mp_rank_00_000").iterdir())) == 2
    written = open_checkpoint(base / "second" / "checkpoints" / "iter_0000006").job.arguments()
    assert written.dataloader_save == str(base / "loader")


def test_plan_names_the_workers_of_each_layout(
    results: Results, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.job("first")
    for gpus, workers in ((4, 4), (8, 1)):
        assert main(["plan", str(base / "first" / "checkpoints"), "--gpus", str(gpus)]) == 0
        assert f"to keep the order: --num-workers {workers}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "reason", "hint"),
    [
        ("refused", "by DP4 with --num-workers 2, now DP2 with --num-workers 2", "--num-workers 4"),
        ("more, refused", "by DP2 with --num-workers 4, now DP4 with --num-workers 4", "--num-workers 2"),
    ],
)
def test_a_job_without_a_worker_for_each_state_says_which_flag_it_needs(
    results: Results, name: str, reason: str, hint: str
) -> None:
    refused = results[name]
    assert refused.returncode != 0
    assert f"(--dataloader-save {reason}: " in refused.output
    assert f"hint: {hint}" in refused.output
