"""Test that untrusted patterns end, with a match or with an error."""

from __future__ import annotations

import sys

import pytest

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.storage import patterns

MODULE = "model.layers.0.self_attn.q_proj"


def test_they_match_like_re() -> None:
    assert patterns.match_pattern(r".*?\.(?P<index>\d+)\.", MODULE) == {"index": "0"}
    assert patterns.match_pattern("model", MODULE) == {}
    assert patterns.match_pattern("model", MODULE, whole=True) is None
    assert patterns.is_pattern(".*q_proj")
    assert not patterns.is_pattern("(")
    assert not patterns.is_pattern(3)


def test_they_may_not_take_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_SECONDS", 0.01)
    with pytest.raises(UnsupportedCheckpointError, match="a pattern takes too long.*a list of names"):
        patterns.match_pattern(r"(a|b|\w|.)*?(\w|.)*?(\w|.)*?(\w|.)*?\d$", MODULE, whole=True)


def test_without_regex_the_message_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "regex", None)
    with pytest.raises(UnsupportedCheckpointError, match="pip install regex"):
        patterns.match_pattern("q_proj", MODULE)
