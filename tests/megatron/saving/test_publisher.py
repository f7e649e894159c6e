"""Test that the last step of a save runs in the background, and that its result is awaited where needed."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from threading import Timer

import pytest

from mcore_ckpt_ext.megatron.live.sidecar_writer import PendingSidecar
from mcore_ckpt_ext.megatron.saving.atomic_write import Disk
from mcore_ckpt_ext.megatron.saving.coordinator import Coordinator
from mcore_ckpt_ext.megatron.saving.publisher import Grace, Publisher
from mcore_ckpt_ext.megatron.saving.ranks import JobRanks
from mcore_ckpt_ext.megatron.saving.save import Save, Step
from mcore_ckpt_ext.patching.singletons import PROCESS


def save_of(run: Path, iteration: int) -> Save:
    folder = run / f"iter_{iteration:07d}"
    tracker = run / "latest_checkpointed_iteration.txt"
    return Save(
        iteration, folder, tracker, str(iteration), True, sidecar=PendingSidecar(lambda: None, lambda record: "{}")
    )


class Run:
    """A publisher of which the disk takes as long as the outcome is not set."""

    def __init__(self, run: Path) -> None:
        self.outcome: Future[str | None] = Future()
        self.said: list[str] = []
        self.own: list[str] = []
        self.publisher = Publisher(Disk(), lambda work: self.outcome, lambda: 0.0, self.said.append, self.said.append)
        self.save = save_of(run, 2)
        self.save.line = "iteration 2 is complete"
        self.publisher.begin(self.save, [Step(lambda: self.own.append("deleted"), is_of_script=True)])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_next_one_waits_for_it_and_learns_that_it_failed(tmp_path: Path, run: Run) -> None:
    run.publisher.prepare(run.save)
    Timer(0.2, run.outcome.set_result, ["no space left"]).start()
    run.publisher.finish(wait=True)
    assert run.save.problem == "iteration 2 was not saved: no space left"
    assert (run.said, run.own) == ([], [])
    assert list(tmp_path.iterdir()) == []


def test_waiting_for_the_end_runs_the_callbacks_of_the_script(run: Run) -> None:
    Timer(0.2, run.outcome.set_result, [None]).start()
    run.publisher.finish(wait=True)
    assert (run.save.problem, run.said, run.own) == (None, ["iteration 2 is complete"], ["deleted"])


def test_training_does_not_wait_for_it(run: Run) -> None:
    run.publisher.finish(wait=False)
    assert run.said == []
    run.outcome.set_result(None)
    run.publisher.finish(wait=False)
    run.publisher.finish(wait=False)
    assert run.said == ["iteration 2 is complete"]


def test_a_publication_is_the_sidecar_and_then_the_tracker(tmp_path: Path, run: Run) -> None:
    save = save_of(tmp_path, 4)
    save.folder.mkdir()
    with pytest.raises(FileNotFoundError, match=r"metadata\.json"):
        run.publisher.publish(save)  # what Megatron writes last is not there
    assert list(save.folder.iterdir()) == []
    (save.folder / "metadata.json").write_text("{}")
    run.publisher.publish(save)
    assert save.tracker.read_text() == "4"
    assert (save.folder / "mcore_ckpt_ext.json").read_text() == "{}"
    assert save.line.startswith(f"iteration 4 is complete on disk: 0.0 MB in {save.folder}, training stalled 0.00 s")


def test_a_save_that_takes_longer_than_a_kill_says_so(tmp_path: Path) -> None:
    clock = [0.0]
    publisher = Publisher(Disk(), lambda work: Future(), lambda: clock[0], print, print)
    lines = []
    try:
        for seconds in (29.0, 31.0):
            PROCESS.one(Grace).seconds = 30.0
            save = save_of(tmp_path, round(seconds))
            save.folder.mkdir()
            (save.folder / "metadata.json").write_text("{}")
            clock[0] = save.began + seconds
            publisher.publish(save)
            lines.append(save.line)
    finally:
        PROCESS.one(Grace).seconds = None
    assert ["the 30 s between SIGTERM and SIGKILL" in line for line in lines] == [False, True]


def test_a_program_without_ranks_saves_too(tmp_path: Path) -> None:
    """Nothing is wrong to agree on where nobody else is."""
    said: list[str] = []
    publisher = Publisher(Disk(), lambda work: Future(), lambda: 0.0, said.append, said.append)
    coordinator = Coordinator(JobRanks(), publisher, said.append, lambda: False)
    save = save_of(tmp_path, 2)
    save.asynchronous = False
    coordinator.run(save, lambda redirected: (save.folder / "metadata.json").write_text("{}"))
    assert save.tracker.read_text() == "2"
    assert said == [save.line]
