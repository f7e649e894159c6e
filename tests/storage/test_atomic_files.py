"""Test what is said of destinations that cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mcore_ckpt_ext.errors import DestinationError
from mcore_ckpt_ext.storage.atomic_files import cannot_write, write_report


@pytest.mark.parametrize(("number", "hint"), [
    (errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"), (errno.EFBIG, "free some space"),
    (errno.EACCES, "that you may write to"), (errno.EROFS, "that you may write to"),
])  # fmt: skip
def test_the_hint_is_about_space_only_where_it_is_short(number: int, hint: str) -> None:
    error = cannot_write(Path("out"), OSError(number, os.strerror(number)))
    assert hint in str(error) and os.strerror(number) in str(error) and "where: out" in str(error)


def test_a_name_in_an_open_folder_is_reported_as_the_destination() -> None:
    error = cannot_write(Path("/data/out"), OSError(errno.EACCES, os.strerror(errno.EACCES), "out.partial-1"))
    assert "where: /data/out;" in str(error)


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.ENOSPC, "free some space, or choose a file"), (errno.EACCES, "choose a file")]
)
def test_a_report_that_cannot_be_written_is_no_damaged_checkpoint(
    number: int, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.open", fail)
    with pytest.raises(DestinationError, match=f"the manifest cannot be written.*hint: {hint} that you may write to$"):
        write_report(tmp_path / "manifest", "", what="the manifest")
