"""Test the reports of the writers behind Megatron's asynchronous saves."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.megatron.saving.strategies import MegatronWriters


@pytest.mark.parametrize("is_empty", [True, False])
def test_are_done(is_empty: bool) -> None:
    writers = MegatronWriters({"is_empty_async_queue": lambda: is_empty}, pytest.fail)
    assert writers.are_done() is is_empty
