"""Test that the name of a file in a checkpoint's metadata never leads out of its folder, nor ends a program."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.storage.files import FolderReader


@pytest.mark.parametrize("name", ["/etc/hostname", "../a", "b/../a", "b/../../a", "a\0b"])
def test_names_that_lead_out_of_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12")
    with FolderReader(tmp_path) as reader:
        with pytest.raises(UnreadableCheckpointError, match="points outside of its own folder"):
            reader.size(name)
        assert reader.size("a") == 2


@pytest.mark.parametrize("name", ["", ".", "b"])
def test_a_folder_is_no_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with FolderReader(tmp_path) as reader, pytest.raises(UnreadableCheckpointError, match="not a regular file"):
        reader.size(name)
