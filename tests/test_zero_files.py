"""Test files that ranks write together for ColossalAI: each is the old or the new one, never a mixture."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext.colossalai.files import Files


def write(files: Files, *names: str) -> None:
    with files:
        for name in names:
            files.add(name, lambda path: path.write_text("new"))
        files.publish()


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def killed_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A kill right before a file gets its name."""
    original = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if target.name == name:
            raise KeyboardInterrupt
        return original(path, target)

    monkeypatch.setattr(Path, "replace", replace)


def test_one_file_alone_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.pt").write_text("old")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_at(patch, "model.pt")
        write(Files(tmp_path, "model.pt", True), "model.pt")
    assert contents(tmp_path) == {"model.pt": "old"}
    write(Files(tmp_path, "model.pt", True), "model.pt")
    assert contents(tmp_path) == {"model.pt": "new"}


@pytest.mark.parametrize("name", ["a.bin", "b.bin", "index.json"])
def test_old_and_new_shards_never_pass_for_one_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("a.bin", "b.bin", "index.json")
    for old in names:
        (tmp_path / old).write_text("old")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_at(patch, name)
        write(Files(tmp_path, "index.json", True), *names)
    assert "index.json" not in contents(tmp_path)
    write(Files(tmp_path, "index.json", True), *names)
    assert contents(tmp_path) == dict.fromkeys(names, "new")
