"""Test whole epochs of genuine jobs: in one go, and through changes of DP, TP, PP and micro batch size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.jobs import LAST, RANK_SCRIPTS, SAVED
from tests.harness.layouts import BATCH, SEQUENCE, Layout
from tests.harness.turns import Results, Turn, run_in_turn

_DP8 = Layout(1, 1, 8)
_BETWEEN = 6
LOADERS = {
    "single": ["--dataloader-type", "single"],
    "cyclic": ["--dataloader-type", "cyclic"],
    "not sharded": ["--dataloader-type", "cyclic", "--no-data-sharding"],
}


@pytest.fixture(scope="module", params=LOADERS)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """An epoch of eight iterations under DP8, and the same under DP8, TP2 x DP4, PP2 x DP4, and DP8 again."""
    folder = tmp_path_factory.mktemp("epoch")

    def turn(name: str, layout: Layout, micro: int, until: int, load: str = "") -> Turn:
        place = folder / name
        (place / "samples").mkdir(parents=True)
        return Turn(
            place, layout, load=folder / load / "checkpoints" if load else None, saves=until != LAST, until=until,
            newest=until, precision=(), more=[*LOADERS[request.param], "--micro-batch-size", str(micro)],
            environment={
                "TEST_SAMPLES": str(place / "samples"), "TEST_EPOCH": str(LAST * BATCH),
                "MCORE_CKPT_EXT_DATA_ORDER": "required",
            },
        )  # fmt: skip

    turns = [
        turn("alone", _DP8, 1, LAST),
        turn("first", _DP8, 1, 2),
        turn("second", Layout(2, 1, 8, more=SEQUENCE), 2, SAVED, "first"),
        turn("third", Layout(1, 2, 8), 1, _BETWEEN, "second"),
        turn("last", _DP8, 1, LAST, "third"),
    ]
    return run_in_turn(folder, turns, [RANK_SCRIPTS / "record_samples.py"])


def _batches(folder: Path, count: int) -> list[list[int]]:
    """The samples of each iteration of a job, sorted; loaders may read ahead."""
    ranks = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((folder / "samples").glob("*.jsonl"))
    ]
    read = [sample for step in zip(*ranks, strict=True) for batch in step for sample in batch]
    return [sorted(read[start : start + BATCH]) for start in range(0, count * BATCH, BATCH)]


def test_every_sample_once_in_the_same_global_batches_with_the_same_losses(results: Results) -> None:
    alone = _batches(results.folder("alone"), LAST)
    assert sorted(sum(alone, [])) == list(range(LAST * BATCH))
    parts = {"first": 2, "second": SAVED - 2, "third": _BETWEEN - SAVED, "last": LAST - _BETWEEN}
    assert sum((_batches(results.folder(name), count) for name, count in parts.items()), []) == alone
    losses = {step: loss for name in parts for step, loss in results.job(name).losses.items()}
    assert losses == pytest.approx(results.job("alone").losses, rel=1e-6)
