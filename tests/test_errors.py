"""Test errors that untrusted metadata causes."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.errors import UnreadableCheckpointError, reraise_as_unreadable


def damaged() -> None:
    raise KeyError("shape")


def test_an_error_of_metadata_names_the_function_that_found_it() -> None:
    found = r"KeyError: 'shape' \(damaged, line \d+\); where: a file"
    with pytest.raises(UnreadableCheckpointError, match=found), reraise_as_unreadable("a file"):
        damaged()
