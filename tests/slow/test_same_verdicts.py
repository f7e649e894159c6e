"""Compare the verdict of a rehearsal with that of genuine Megatron-LM, for every fixture and way to damage it.

TEST_MATRIX names fixtures, for a part; `tests/jobs/test_refusals.py` has a sample in the test command.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from tests.harness.checkpoints import FIXTURES, fixture_named
from tests.harness.damage import flip, payload_position, remove_schedule
from tests.harness.jobs import SAVED, copy_of
from tests.harness.rehearsals import rehearsal_of_resume
from tests.harness.sources import PLUGINS, SOURCES, Source, layouts_of
from tests.harness.turns import Results, Turn, run_in_turn

NAMES = os.environ.get("TEST_MATRIX", "").split() or [name.partition("_")[0] for name in FIXTURES]
MATRIX = re.compile(r"decoder\.layers\.1\.mlp\.(experts\.experts\.0\.)?linear_fc1\.weight")
TRACKER = "latest_checkpointed_iteration.txt"


def iteration(run: Path) -> Path:
    (folder,) = run.glob("iter_*")
    return folder


def largest_file(run: Path) -> Path:
    files = (path for path in iteration(run).rglob("*") if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


def nothing(run: Path) -> None:
    pass


def a_missing_file(run: Path) -> None:
    largest_file(run).unlink()


def no_state_of_a_rank(run: Path) -> None:
    sorted(iteration(run).rglob("distrib_optim.pt"))[0].unlink()


def a_truncated_file(run: Path) -> None:
    path = largest_file(run)
    os.truncate(path, path.stat().st_size // 2)


def a_garbage_index(run: Path) -> None:
    (iteration(run) / ".metadata").write_bytes(b"\x80\x04garbage" * 50)


def no_mark_of_the_end(run: Path) -> None:
    (iteration(run) / "metadata.json").unlink()


def a_tracker_of_a_missing_iteration(run: Path) -> None:
    (run / TRACKER).write_text("40")


def flipped(kind: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        checkpoint = open_checkpoint(run)
        matrix = next(name for name in sorted(checkpoint.names(kind)) if MATRIX.fullmatch(name))
        path, position = payload_position(checkpoint, kind, matrix, 0)
        flip(path, position + (1 if kind == WEIGHT else 3))

    return damage


def no_schedule(run: Path) -> None:
    remove_schedule(iteration(run))


DAMAGES = {
    "intact": nothing,
    "a missing file": a_missing_file,
    "no state of a rank": no_state_of_a_rank,
    "a truncated file": a_truncated_file,
    "a garbage index": a_garbage_index,
    "no metadata.json": no_mark_of_the_end,
    "a tracker of a missing iteration": a_tracker_of_a_missing_iteration,
    "a weight's byte": flipped(WEIGHT),
    "a master's byte": flipped(FP32_PARAM),
    "no schedule": no_schedule,
}


def damaged(name: str, folder: Path) -> dict[str, Path]:
    """Make a damaged copy of a fixture for each way that its format allows."""
    runs = {}
    for what, damage in DAMAGES.items():
        run = copy_of(fixture_named(name).run, folder / what)
        try:
            damage(run)
        except (FileNotFoundError, IndexError):
            continue  # its format has no such file
        runs[what] = run
    return runs


@pytest.mark.parametrize("name", NAMES)
def test_a_rehearsal_ends_as_the_job(name: str, tmp_path: Path) -> None:
    source, layout = SOURCES.get(name, Source()), layouts_of(name)["moved 1"]
    runs = damaged(name, tmp_path / "runs")
    turns = [
        Turn(tmp_path / what, layout, more=source.more, load=run, until=SAVED + 1, **source.options)
        for what, run in runs.items()
    ]
    results = run_in_turn(tmp_path, turns, [*PLUGINS, *source.plugins])
    verdicts = {what: verdict(results, what, run, name) for what, run in runs.items()}
    assert {what: found for what, found in verdicts.items() if found} == {}


def verdict(results: Results, what: str, run: Path, name: str) -> str:
    """Return how the rehearsal and the job differ; empty if they agree."""
    job = results[what]
    found = rehearsal_of_resume(run, layouts_of(name)["moved 1"])
    if found.will_succeed != (job.returncode == 0):
        return f"rehearsal: {found.refusal or 'will succeed'}; job: {job.output[-1500:]}"
    if found.is_verbatim and found.refusal is not None and found.refusal.splitlines()[-1] not in job.output:
        return f"other words: {found.refusal}; job: {job.output[-1500:]}"
    return ""
