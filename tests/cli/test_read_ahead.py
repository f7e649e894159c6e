"""Bytes that the page cache holds before a command asks for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_ckpt_ext.cli import read_ahead
from mcore_ckpt_ext.cli.read_ahead import begin_to_read
from mcore_ckpt_ext.storage import checkpoint_dirs

CONTENT = os.urandom(1 << 18)


def is_cached(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(len(CONTENT))], 0, os.RWF_NOWAIT) == len(CONTENT)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def evict(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for iteration in ("iter_0000001", "iter_0000002"):
        (tmp_path / "run" / iteration).mkdir(parents=True)
        (tmp_path / "run" / iteration / "__0_0.distcp").write_bytes(CONTENT)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("1")
    return tmp_path / "run"


@pytest.mark.parametrize("words", [["verify"], ["diff", "--json"]])
def test_the_iteration_of_the_tracker_is_read(words: list[str], run: Path) -> None:
    file = run / "iter_0000001" / "__0_0.distcp"
    evict(file)
    thread = begin_to_read([*words, str(run)])
    assert thread is not None
    assert thread.daemon
    thread.join()
    assert is_cached(file)


def test_which_folder_a_tracker_means(run: Path) -> None:
    tracker = run / checkpoint_dirs.TRACKER_FILE
    assert read_ahead._TRACKER == checkpoint_dirs.TRACKER_FILE
    for text in ("1", checkpoint_dirs.RELEASE):
        tracker.write_text(text)
        named = checkpoint_dirs.read_tracker(tracker)
        assert named is not None
        assert read_ahead._iteration(run) == named.folder
    tracker.write_text("../elsewhere")
    assert begin_to_read(["verify", str(run)]) is None
    tracker.unlink()
    assert read_ahead._iteration(run) == run


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["verify", "--quick"], ["diff", "--kinds", "weight"], ["convert"], ["inspect"]]
)
def test_commands_that_read_less_are_left_alone(words: list[str], run: Path) -> None:
    assert begin_to_read([*words, str(run)]) is None


def without_memory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_available_memory", lambda: 2 * len(CONTENT) - 1)


def of_hugging_face(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "iter_0000001" / "config.json").touch()


def of_pipes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "iter_0000001" / "__0_0.distcp").unlink()
    os.mkfifo(run / "iter_0000001" / "__0_0.distcp")


def gone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "latest_checkpointed_iteration.txt").write_text("3")


@pytest.mark.parametrize("state", [without_memory, of_hugging_face, of_pipes, gone])
def test_folders_that_are_not_read_ahead(
    state: Callable[[Path, pytest.MonkeyPatch], None], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state(run, monkeypatch)
    assert begin_to_read(["verify", str(run)]) is None
