"""Test how a load treats keys that only the checkpoint has; `tests/jobs/test_refusals.py` has what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mcore_ckpt_ext.megatron.strictness import strictness


@pytest.mark.parametrize(("chosen", "relaxed"), [("raise_all", True), ("assume_ok_unexpected", False)])
def test_what_is_stored_and_not_requested_is_no_error(chosen: str, relaxed: bool) -> None:
    expected = {"dist_ckpt_strictness": "raise_unexpected"} if relaxed else {}
    assert strictness(SimpleNamespace(dist_ckpt_strictness=chosen)) == expected
