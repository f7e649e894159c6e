"""Test that files are uploaded while the next is made, in bounded memory and bounded temporary space."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext.operations import staged_uploads as module
from mcore_ckpt_ext.operations.staged_uploads import staged_uploads
from mcore_ckpt_ext.planning.write_plan import OutputFile
from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.storage.paths import as_path
from mcore_ckpt_ext.storage.remote import Upload
from mcore_ckpt_ext.writing import lay_out

WAIT = 60
FILES = [OutputFile(f"below/{number}", 3, ((0, b"abc"),)) for number in range(5)]


class HeldUpload(Upload):
    """An upload whose files arrive when `released` is set."""

    def __init__(self) -> None:
        super().__init__(as_path(f"memory://{uuid.uuid4()}/run"), "fingerprint")
        self.open(resume=False)
        self.begun: list[str] = []
        self.has_begun = threading.Event()
        self.released = threading.Event()

    def put(self, local: Path, name: str) -> None:
        self.begun.append(name)
        self.has_begun.set()
        assert self.released.wait(WAIT)
        super().put(local, name)


def staged(folder: Folder) -> list[str]:
    return sorted(str(path.relative_to(folder.path)) for path in folder.path.rglob("*") if path.is_file())


def test_the_first_file_is_uploaded_while_the_last_is_made() -> None:
    upload = HeldUpload()

    def make_last(folder: Folder) -> None:
        assert upload.has_begun.wait(WAIT)
        assert upload.begun[0] == FILES[0].name
        lay_out([FILES[1]], folder)
        upload.released.set()

    with staged_uploads(upload) as uploads:
        uploads.add(FILES[0], lambda folder: lay_out([FILES[0]], folder))
        uploads.add(FILES[1], make_last)
    assert upload.finished_files() == {FILES[0].name: 3, FILES[1].name: 3}


@pytest.mark.parametrize(("limit", "most"), [(100, module.UPLOADS_AT_ONCE + 1), (6, 2), (5, 1), (1, 1)])
def test_temporary_files_are_bounded(limit: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAGED_BYTES", limit)
    upload = Upload(as_path(f"memory://{uuid.uuid4()}/run"), "fingerprint")
    upload.open(resume=False)
    counts: list[int] = []

    def make(file: OutputFile, folder: Folder) -> None:
        lay_out([file], folder)
        counts.append(len(staged(folder)))

    with staged_uploads(upload) as uploads:
        for file in FILES:
            uploads.add(file, lambda folder, file=file: make(file, folder))
    assert max(counts) <= most
    assert upload.finished_files() == {file.name: 3 for file in FILES}


def test_after_an_interrupt_all_that_was_made_is_uploaded_and_nothing_is_left_here() -> None:
    upload = HeldUpload()
    places: list[Path] = []

    def interrupt(folder: Folder) -> None:
        places.append(folder.path)
        upload.released.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), staged_uploads(upload) as uploads:
        for file in FILES[: module.UPLOADS_AT_ONCE]:
            uploads.add(file, lambda folder, file=file: lay_out([file], folder))
        upload.released.set()
        uploads.add(FILES[-1], interrupt)
    assert upload.finished_files().keys() == {file.name for file in FILES[: module.UPLOADS_AT_ONCE]}
    assert not places[0].exists()


def test_the_error_of_an_upload_ends_the_work() -> None:
    class Failing(HeldUpload):
        def put(self, local: Path, name: str) -> None:
            raise OSError(28, "No space left on device")

    made: list[str] = []
    with pytest.raises(OSError, match="No space left"), staged_uploads(Failing()) as uploads:
        for file in FILES:
            uploads.add(file, lambda folder, file=file: made.append(file.name))
    assert len(made) <= module.UPLOADS_AT_ONCE


def test_parts_under_way_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs sends no more at once than the options say, whatever the size of the file."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    from mcore_ckpt_ext.storage import multipart

    monkeypatch.setattr(multipart, "_PART_BYTES", 1 << 20)
    monkeypatch.setattr(multipart, "UPLOAD_BYTES", 4 << 20)
    under_way, most, sent = 0, 0, 0

    async def call(_: object, method: str, *__: object, **options: Any) -> dict[str, str]:
        nonlocal under_way, most, sent
        if method == "upload_part":
            under_way += len(options["Body"])
            most = max(most, under_way)
            await asyncio.sleep(0.001)
            under_way -= len(options["Body"])
            sent += len(options["Body"])
        return {"UploadId": "1", "ETag": "1"}

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    (tmp_path / "file").write_bytes(os.urandom(1 << 10) * (21 << 10))
    as_path("s3://bucket/file").upload(tmp_path / "file")  # type: ignore[attr-defined]
    assert (most, sent) == (4 << 20, 21 << 20)
