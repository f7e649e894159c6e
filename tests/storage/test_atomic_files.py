"""Test what is said of destinations that cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mcore_ckpt_ext.storage.atomic_files import cannot_write


@pytest.mark.parametrize(("number", "hint"), [
    (errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"), (errno.EFBIG, "free some space"),
    (errno.EACCES, "that you may write to"), (errno.EROFS, "that you may write to"),
])  # fmt: skip
def test_the_hint_is_about_space_only_where_it_is_short(number: int, hint: str) -> None:
    error = cannot_write(Path("out"), OSError(number, os.strerror(number)))
    assert hint in str(error) and os.strerror(number) in str(error) and "where: out" in str(error)
