"""Tests sizes of files that are known without opening the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.operations.completeness import check_index
from mcore_ckpt_ext.storage.checked_files import readable_sizes
from mcore_ckpt_ext.storage.dcp_index import read_index
from mcore_ckpt_ext.storage.files import FolderReader
from tests.harness.checkpoints import fixture_named


def test_regular_files_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    assert readable_sizes(tmp_path) == {"a": 3, "empty": 0}


def test_an_intact_folder_is_checked_without_opening_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_checkpoint(fixture_named("p01").run).files.folder
    index = read_index(folder)
    opened: list[str] = []
    monkeypatch.setattr(FolderReader, "_open", lambda self, file: opened.append(file))
    findings, unreadable, files = check_index(FolderReader(folder), index)
    assert (findings, unreadable, opened) == ([], set(), [])
    assert files > 1


def test_a_link_out_of_the_folder_is_no_size(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"12345")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    reader = FolderReader(folder)
    assert "link" not in reader.sizes()
    with pytest.raises(UnreadableCheckpointError, match="out of the folder"):
        reader.size("link")
