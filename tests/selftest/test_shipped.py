"""The checkpoint in the package is unpacked by every supported Python."""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.selftest.jobs import Order
from mcore_ckpt_ext.selftest.plan import EIGHT_RANKS
from mcore_ckpt_ext.selftest.shipped import unpack


def test_it_is_sound(tmp_path: Path) -> None:
    order = Order(tmp_path, ())
    unpack(order)
    assert order.results.is_file()
    assert verify(str(order.checkpoints(EIGHT_RANKS))).sound
