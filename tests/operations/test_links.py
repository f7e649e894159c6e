"""Test links and special files in a source folder: nothing outside of the folder is read or copied."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.targets import Target
from tests.harness.checkpoints import Fixture, fixture_named

SECRET = b'{"secret": true}'


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "tokenizer.json").write_bytes(SECRET)
    return tmp_path / "etc" / "tokenizer.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("huggingface") / "model"
    mcore_ckpt_ext.convert(fixture_named("p02").run, folder, mcore_ckpt_ext.HuggingFace())
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "model")
    return tmp_path / "model"


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("to", [mcore_ckpt_ext.TorchDist(), mcore_ckpt_ext.HuggingFace()], ids=lambda to: to.name)
def test_a_link_to_somebodys_file_is_not_copied(to: Target, model: Path, secret: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").symlink_to(secret)
    report = mcore_ckpt_ext.convert(model, tmp_path / "out", to)
    assert SECRET not in everything(tmp_path / "out")
    (note,) = (note for note in report.notes if "not copied" in note)
    assert "tokenizer.json" in note and str(secret) in note
    assert any(note.startswith("copied along") and "tokenizer_config.json" in note for note in report.notes)


def test_nor_is_a_folder_of_tokenizers_that_is_a_link(damaged: Fixture, secret: Path, tmp_path: Path) -> None:
    (damaged.iteration / "tokenizer").symlink_to(secret.parent)
    report = mcore_ckpt_ext.convert(damaged.run, tmp_path / "out", mcore_ckpt_ext.TorchDist())
    assert SECRET not in everything(tmp_path / "out")
    assert any("not copied: tokenizer.json" in note for note in report.notes)


def test_nor_is_the_tokenizer_that_the_user_names(model: Path, secret: Path, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").symlink_to(secret)
    to = mcore_ckpt_ext.HuggingFace(tokenizer=str(tmp_path / "words"))
    with pytest.raises(UnreadableCheckpointError, match=r"no tokenizer.*leads out of the folder"):
        mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "out", to)


def test_a_cache_of_hugging_face_is_followed(model: Path, tmp_path: Path) -> None:
    """As huggingface_hub lays it out: snapshots are links to the blobs beside them."""
    cache = tmp_path / "hub" / "models--somebody--llama"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(model.iterdir()):
        path.rename(cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    mcore_ckpt_ext.convert(snapshot, tmp_path / "out", mcore_ckpt_ext.TorchDist())
    assert (tmp_path / "out" / "iter_0000000").exists() or (tmp_path / "out" / "release").exists()


LINKED = ["common.pt", ".metadata", "metadata.json", "__0_0.distcp"]


@pytest.mark.parametrize("name", LINKED)
def test_files_of_a_checkpoint_are_not_elsewhere(name: str, damaged: Fixture, tmp_path: Path) -> None:
    (damaged.iteration / name).rename(tmp_path / "elsewhere")
    (damaged.iteration / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        mcore_ckpt_ext.convert(damaged.run, tmp_path / "out", mcore_ckpt_ext.Canonical())


def test_links_within_a_folder_are_followed(damaged: Fixture, tmp_path: Path) -> None:
    (damaged.iteration / "common.pt").rename(damaged.iteration / "kept.pt")
    (damaged.iteration / "common.pt").symlink_to("kept.pt")
    damaged.iteration.rename(tmp_path / "iter_0000004")
    damaged.iteration.symlink_to(tmp_path / "iter_0000004")
    assert mcore_ckpt_ext.open_checkpoint(damaged.run).job.iteration() == 4


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [pipe, device, folder], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", [*LINKED, "mcore_ckpt_ext.json", "integrity.json"])
def test_special_files_do_not_block(make: Callable[[Path], None], name: str, damaged: Fixture) -> None:
    """A FIFO would hold its reader for ever."""
    (damaged.iteration / name).unlink(missing_ok=True)
    make(damaged.iteration / name)
    found = verify(damaged.run)
    assert name == "mcore_ckpt_ext.json" or any("error" in repr(finding) for finding in found.findings)


@pytest.mark.parametrize("make", [pipe, device, folder], ids=lambda make: make.__name__)
def test_they_are_refused_by_name(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=r"not a regular file|leads out") as caught:
        read_file(tmp_path, "file")
    assert caught.value.errno in (errno.EINVAL, errno.ELOOP)
    with FolderReader(tmp_path) as reader, pytest.raises(UnreadableCheckpointError, match=r"not a regular|leads out"):
        reader.read("file", 0, 1)
