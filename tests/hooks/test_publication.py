"""The last step of a save runs beside training; what comes of it is waited for where it must be known."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from threading import Timer

import pytest

from mcore_ckpt_ext.errors import SaveFailedError
from mcore_ckpt_ext.hooks import saving
from mcore_ckpt_ext.hooks.saving import Save
from mcore_ckpt_ext.online.durable import tracked


def save_of(run: Path, iteration: int) -> Save:
    folder = run / f"iter_{iteration:07d}"
    tracker = run / "latest_checkpointed_iteration.txt"
    return Save(iteration, folder, tracker, str(iteration), True, record=lambda record: "{}")


@pytest.fixture
def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Future[str | None]:
    """Of the publication of iteration 2, which is under way on this rank."""
    future: Future[str | None] = Future()
    monkeypatch.setattr(saving, "_publication", saving._Publication(save_of(tmp_path, 2), [], future))
    monkeypatch.setattr(saving, "_unpublished", [])
    return future


def test_the_next_save_waits_for_it_and_tells_that_it_failed(tmp_path: Path, outcome: Future[str | None]) -> None:
    (tmp_path / "iter_0000002").mkdir()
    Timer(0.2, outcome.set_result, ["no space left"]).start()
    with pytest.raises(SaveFailedError, match="iteration 2 was not saved: no space left"):
        saving._begin(save_of(tmp_path, 4))
    assert list(tmp_path.iterdir()) == []


def test_the_next_save_begins_where_it_went_well(tmp_path: Path, outcome: Future[str | None]) -> None:
    Timer(0.2, outcome.set_result, [None]).start()
    saving._begin(save_of(tmp_path, 4))
    assert outcome.done()
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000004"]


def test_training_does_not_wait_for_it(outcome: Future[str | None]) -> None:
    saving._end_publication(wait=False)
    assert not outcome.done()
    assert saving._publication is not None


def test_a_publication_is_the_sidecar_and_then_the_tracker(tmp_path: Path) -> None:
    save = save_of(tmp_path, 4)
    save.folder.mkdir()
    with pytest.raises(FileNotFoundError, match="metadata.json"):
        saving._publish(save)  # what Megatron writes last is not there
    assert list(save.folder.iterdir()) == []
    (save.folder / "metadata.json").write_text("{}")
    saving._publish(save)
    assert tracked(save.tracker) == 4
    assert (save.folder / "mcore_ckpt_ext.json").read_text() == "{}"
    assert save.line.startswith(f"iteration 4 is complete on disk: 0.0 MB in {save.folder}, training stalled 0.00 s")
