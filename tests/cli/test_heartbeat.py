"""Test the order in which processes that share a command leave it."""

from __future__ import annotations

from threading import Event, Timer

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
