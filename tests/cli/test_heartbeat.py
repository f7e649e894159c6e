"""Test the order in which processes that share a command leave it."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from threading import Event, Timer

import pytest
from torch.distributed import HashStore

from mcore_ckpt_ext.cli.heartbeat import Heartbeat


def test_a_process_leaves_after_the_first_which_reports() -> None:
    """Otherwise torchrun could end the first one while it prints differences."""
    store, has_reported = HashStore(), Event()

    def report() -> None:
        has_reported.set()
        store.set("ended/0", "")

    with Heartbeat(store, 1, 2, None):
        Timer(0.1, report).start()
    assert has_reported.is_set()


def test_a_failed_process_ends_after_the_others_have_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torchrun could end them while they print their errors; one that succeeded has none."""
    store, has_reported = HashStore(), Event()
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    store.set("ended/2", "")

    def report() -> None:
        has_reported.set()
        store.set("reported/0", "")

    with pytest.raises(ValueError, match="damaged"), Heartbeat(store, 1, 3, None):
        raise ValueError("damaged")
    Timer(0.1, report).start()
    for function in at_exit:
        function()
    assert has_reported.is_set()
