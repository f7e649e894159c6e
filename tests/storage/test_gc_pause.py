"""Test that the collector is paused, and that it does not scan afterwards what was created in the meantime."""

from __future__ import annotations

import gc

from mcore_ckpt_ext.storage.gc_pause import collector_paused


def test_objects_of_a_pause_are_old_after_it() -> None:
    gc.unfreeze()  # libraries freeze, too
    gc.collect()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            made: list[object] = [[] for _ in range(25_000)]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not any(other is made for other in gc.get_objects(generation=0))
    assert any(other is made for other in gc.get_objects(generation=2))


def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_paused():
            pass
        assert gc.get_freeze_count() == frozen > 0
    finally:
        gc.unfreeze()
