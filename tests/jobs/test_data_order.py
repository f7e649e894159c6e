"""Test that a genuine job reads each sample once through changes of layout, and says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron_on_cpu import launch
from megatron_on_cpu.toy_jobs import tiny_gpt

from tests.harness.jobs import LAST, RANK_SCRIPTS, SAVED
from tests.harness.layouts import BATCH, Layout
from tests.harness.turns import Results, Turn, run_in_turn

_CYCLIC = ["--dataloader-type", "cyclic"]
_BETWEEN = 6
_DP4, _TP2 = Layout(1, 1, 4), Layout(2, 1, 4)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A job without interruption, and the same with two changes of layout in its first epoch, in fp32."""
    folder = tmp_path_factory.mktemp("data_order")

    def turn(name: str, layout: Layout, *more: str, load: str = "", required: bool = False, **options: object) -> Turn:
        place = folder / name
        (place / "samples").mkdir(parents=True)
        environment = {"TEST_SAMPLES": str(place / "samples"), "MCORE_CKPT_EXT_EXPLAIN": "1"}
        if required:
            environment["MCORE_CKPT_EXT_DATA_ORDER"] = "required"
        run = folder / load / "checkpoints" if load else None
        return Turn(place, layout, load=run, more=[*_CYCLIC, *more], precision=(), environment=environment, **options)

    turns = [
        turn("alone", _DP4, saves=True, until=LAST),
        turn("second", _TP2, "--micro-batch-size", "1", load="alone", saves=True, until=_BETWEEN, newest=_BETWEEN,
             required=True),
        turn("third", _DP4, load="second", until=LAST, required=True),
        turn("other data", _TP2, "--seed", "7", load="alone", until=SAVED + 1),
        turn("refused", _TP2, "--seed", "7", load="alone", until=SAVED + 1, required=True),
    ]  # fmt: skip
    return run_in_turn(folder, turns, [RANK_SCRIPTS / "record_samples.py"])


def _batches(folder: Path) -> list[list[int]]:
    """The samples of each iteration of a job, sorted."""
    ranks = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / "samples").glob("*.jsonl"))
    ]
    assert len({len(batches) for batches in ranks}) == 1
    read = [sample for step in zip(*ranks, strict=True) for batch in step for sample in batch]
    return [sorted(read[start : start + BATCH]) for start in range(0, len(read), BATCH)]


def test_every_iteration_has_the_samples_of_the_job_without_interruption(results: Results) -> None:
    alone, second, third = (_batches(results.folder(name)) for name in ("alone", "second", "third"))
    assert second == alone[SAVED:_BETWEEN]
    assert third == alone[_BETWEEN:LAST]
    read = [sample for batch in alone for sample in batch]
    assert len(set(read)) == len(read) == LAST * BATCH


def test_the_losses_are_those_of_the_job_without_interruption(results: Results) -> None:
    losses = [results.job(name).losses for name in ("alone", "second", "third")]
    for resumed in losses[1:]:
        for iteration, loss in resumed.items():
            assert loss == pytest.approx(losses[0][iteration], rel=1e-6)


def test_the_summary_says_how_the_data_goes_on(results: Results) -> None:
    summary = results.job("second").summary.string
    assert "data: goes on at sample 32, same order; the epoch in progress is read to its end" in summary
    assert "(DP4 with micro batch 2 before, DP2 with micro batch 1 now)" in summary
    (line,) = [line for line in results.job("third").said if "data:" in line]
    assert "goes on at sample 48, same order" in line


def test_another_order_is_said_and_refused_if_the_user_requires_the_same(results: Results) -> None:
    said = "data: goes on at sample 32, another order (--seed was 1234, is 7: the data set is shuffled otherwise)"
    assert said in results.job("other data").summary.string
    refused = results["refused"]
    assert refused.returncode != 0
    assert "the data does not go on in the same order" in refused.output
    assert "hint: --seed 1234" in refused.output


@pytest.mark.nightly
def test_a_changed_blend_in_the_same_file_is_said(tmp_path: Path) -> None:
    """The toy script reads mock data whatever the flags are; the file is read at the start of a job."""
    blend, run = tmp_path / "blend.txt", tmp_path / "run"

    def said(words: str, **options: object) -> list[str]:
        blend.write_text(words)
        arguments = tiny_gpt(1, 1, more=("--data-args-path", str(blend), "--override-opt_param-scheduler"), **options)
        arguments.remove("--mock-data")
        result = launch.run(1, launch.TRAIN_GPT, arguments, timeout=120)
        assert result.returncode == 0, result.output
        return [line for line in result.output.splitlines() if "data: goes on" in line]

    assert said("0.3 a 0.7 b", iterations=SAVED, save=run) == []
    assert said("3 a 7 b", iterations=SAVED, load=run) == []
    (line,) = said("0.5 a 0.5 b", iterations=SAVED, load=run)
    assert "another order (--data-args-path was 0.3 a 0.7 b, is 0.5 a 0.5 b: the data sets are mixed otherwise)" in line
