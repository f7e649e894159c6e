"""Test how often a store is asked what a folder holds."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.storage.paths import file_sizes
from mcore_ckpt_ext.storage.store_path import StorePath
from tests.harness.checkpoints import fixture_named


@pytest.fixture
def folder() -> StorePath:
    place = StorePath.of(f"memory://{uuid.uuid4()}/run")
    (place / "iter" / "small").write_bytes(b"abc")
    (place / "iter" / "large").write_bytes(bytes(1 << 17))
    (place / "iter" / "below" / "file").write_bytes(b"d")
    (place / "tracker").write_bytes(b"1")
    return place


def noted(name: str, method: Callable[..., object], calls: list[str]) -> Callable[..., object]:
    def call(files: MemoryFileSystem, path: str, *more: object, **options: object) -> object:
        calls.append(f"{name} {path.partition('/run')[2]}")
        return method(files, path, *more, **options)

    return call


@pytest.fixture
def requests(folder: StorePath, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions about a folder and the files that are read, each with its path in the run folder."""
    calls: list[str] = []
    for name in ("info", "ls", "cat_file"):
        monkeypatch.setattr(MemoryFileSystem, name, noted(name, getattr(MemoryFileSystem, name), calls))
    return calls


def test_a_folder_is_asked_once(folder: StorePath, requests: list[str]) -> None:
    run = folder.list_once()
    assert run.is_dir()
    assert (run / "tracker").is_file()
    assert not (run / "other").exists()
    assert not (run / "other" / "config.json").exists()
    iteration = run / "iter"
    assert (iteration / "small").stat().st_size == 3
    assert not (iteration / "small" / "config.json").exists()
    assert {path.name for path in iteration.iterdir()} == {"small", "large", "below"}
    assert requests == ["ls ", "ls /iter"]
    with pytest.raises(FileNotFoundError, match="iter/other"):
        (iteration / "other").stat()


def test_a_small_file_is_read_once_and_a_large_one_is_not_kept(folder: StorePath, requests: list[str]) -> None:
    iteration = (folder / "iter").list_once()
    for _ in range(2):
        assert (iteration / "small").read_text() == "abc"
        assert len((iteration / "large").read_bytes()) == 1 << 17
    assert requests == ["ls /iter", "cat_file /iter/small", *["cat_file /iter/large"] * 2]
    with pytest.raises(FileNotFoundError):
        (iteration / "other").read_bytes()


def test_a_new_listing_sees_what_was_written_meanwhile(folder: StorePath) -> None:
    before = folder.list_once()
    assert not (before / "new").exists()
    (folder / "new").write_bytes(b"e")
    assert not (before / "new").exists()
    assert (folder.list_once() / "new").exists()
    assert (before.parent / "run" / "new").exists()  # outside of the listed folder


def test_sizes_come_from_the_listing_of_a_folder_without_folders(folder: StorePath, requests: list[str]) -> None:
    assert file_sizes((folder / "iter" / "below").list_once()) == {"file": 1}  # type: ignore[arg-type]
    assert requests == ["ls /iter/below"]
    assert file_sizes((folder / "iter").list_once()) == {"small": 3, "large": 1 << 17, "below/file": 1}  # type: ignore[arg-type]


def test_verify_asks_for_each_small_file_once(requests: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    source = fixture_named("p01").run
    place = StorePath.of(f"memory://{uuid.uuid4()}/run")
    for path in source.rglob("*"):
        if path.is_file():
            (place / path.relative_to(source).as_posix()).write_bytes(path.read_bytes())
    requests.clear()
    assert main(["verify", str(place)]) == 0
    iteration = next(source.glob("iter_*")).name
    assert requests.count(f"cat_file /{iteration}/metadata.json") == 1
    assert requests.count(f"ls /{iteration}") == 1
    assert not [call for call in requests if call.startswith(f"info /{iteration}/")]
