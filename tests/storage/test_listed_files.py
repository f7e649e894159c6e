"""Test that an index lists only files of its own folder, and that messages shorten what it lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.storage.listed_files import check_listed, is_file_name

OUTSIDE = ["", ".", "..", "../x", "/dev/zero", "below/x", "below/../x", "x\0", "x" * 256, "\ud800" * 86, "a/" * 1500]


@pytest.mark.parametrize("name", OUTSIDE, ids=range(len(OUTSIDE)))
def test_names_of_no_file_in_the_folder(name: str, tmp_path: Path) -> None:
    assert not is_file_name(name)
    with pytest.raises(UnreadableCheckpointError, match="do not trust it") as caught:
        check_listed(tmp_path / "index.json", [name] * 10, "download it")
    assert len(str(caught.value)) < 2000


def test_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    check_listed(tmp_path / "index.json", ["there"], "download it")
    with pytest.raises(UnreadableCheckpointError, match="found: x;.*hint: download it"):
        check_listed(tmp_path / "index.json", ["there", "x"], "download it")
