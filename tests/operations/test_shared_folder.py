"""Test a parent folder that others may write to: nothing that they put there is used, followed or trusted."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import DestinationError
from mcore_ckpt_ext.storage.atomic_files import replace_files
from mcore_ckpt_ext.storage.folder import Folder
from mcore_ckpt_ext.storage.publish import Publication
from tests.harness.checkpoints import fixture_named

WORK = "a" * 16


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of somebody, elsewhere."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "keys").write_text("secret")
    return tmp_path / "home" / "keys"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir(mode=0o777)
    return tmp_path / "shared"


def unfinished(shared: Path) -> Path:
    """Where the unfinished folder of `out` lies."""
    return Publication(shared / "out", WORK).folder.parent


def test_the_unfinished_folder_belongs_to_one_user(shared: Path) -> None:
    publication = Publication(shared / "out", WORK)
    publication.open()
    assert stat.S_IMODE(unfinished(shared).stat().st_mode) == 0o700
    publication.publish()
    publication.close()
    assert stat.S_IMODE((shared / "out").stat().st_mode) & 0o700 == 0o700
    assert [path.name for path in shared.iterdir()] == ["out"]


@pytest.mark.parametrize(("umask", "folder", "file"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (0, 0o777, 0o666)])
def test_published_folders_have_ordinary_permissions(umask: int, folder: int, file: int, shared: Path) -> None:
    """The unfinished folder is shut whatever the umask says, and leaves no trace of that."""
    before = os.umask(umask)
    try:
        publication = Publication(shared / "out", WORK)
        publication.open()
        os.close(publication.content.open("iter_0000004/file", os.O_WRONLY | os.O_CREAT))
        assert stat.S_IMODE(unfinished(shared).stat().st_mode) == 0o700
        publication.publish()
        publication.close()
    finally:
        os.umask(before)
    found = [stat.S_IMODE((shared / name).stat().st_mode) for name in ("out", "out/iter_0000004")]
    assert found == [folder, folder]
    assert stat.S_IMODE((shared / "out/iter_0000004/file").stat().st_mode) == file


def planted_link(place: Path, victim: Path) -> None:
    place.symlink_to(victim.parent)


def planted_file(place: Path, victim: Path) -> None:
    place.write_text("not a folder")


def open_to_all(place: Path, victim: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


@pytest.mark.parametrize("plant", [planted_link, planted_file, open_to_all], ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("resume", [False, True])
def test_planted_folders_are_refused(
    plant: Callable[[Path, Path], None], resume: bool, shared: Path, victim: Path
) -> None:
    plant(unfinished(shared), victim)
    publication = Publication(shared / "out", WORK)
    with pytest.raises(DestinationError, match="refusing to use the temporary folder"):
        publication.open(resume=resume)
    publication.close()
    assert victim.read_text() == "secret"
    assert [path.name for path in victim.parent.iterdir()] == ["keys"]


def test_another_users_folder_is_not_adopted(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished(shared).mkdir(mode=0o700)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(DestinationError, match="owned by another user"):
        Publication(shared / "out", WORK).open(resume=True)


@pytest.mark.parametrize("name", ["lock", "work", "journal0", "content"])
@pytest.mark.parametrize("resume", [False, True])
def test_links_below_are_not_followed(name: str, resume: bool, shared: Path, victim: Path) -> None:
    """Of a folder that is ours, but was not always, say."""
    unfinished(shared).mkdir(mode=0o700)
    (unfinished(shared) / name).symlink_to(victim.parent if name == "content" else victim)
    publication = Publication(shared / "out", WORK)
    try:
        publication.open(resume=resume)
        publication.record_finished(0, 0)
        publication.finished_records()
    except DestinationError:
        pass
    finally:
        publication.close()
    assert victim.read_text() == "secret"
    assert [path.name for path in victim.parent.iterdir()] == ["keys"]


def test_files_are_not_reached_through_links(shared: Path, victim: Path) -> None:
    (shared / "out").mkdir()
    (shared / "out" / "iter_0000004").symlink_to(victim.parent)
    (shared / "out" / "file").symlink_to(victim)
    os.mkfifo(shared / "out" / "pipe")
    with Folder.at(shared / "out") as folder:
        for name in ("iter_0000004/keys", "file", "pipe"):
            with pytest.raises(OSError, match=r"symbolic links|Not a directory|not a regular file|No such device"):
                folder.open(name, os.O_RDWR | os.O_CREAT)
        folder.remove("iter_0000004")
    assert victim.read_text() == "secret"


def test_a_folder_that_is_swapped_meanwhile_changes_nothing(shared: Path, victim: Path) -> None:
    """In a shared folder without the sticky bit, others may rename what is ours."""
    publication = Publication(shared / "out", WORK)
    publication.open()
    unfinished(shared).rename(shared / "moved")
    unfinished(shared).symlink_to(victim.parent)
    descriptor = publication.content.open("file", os.O_WRONLY | os.O_CREAT)
    os.close(descriptor)
    publication.record_finished(0, 0)
    assert sorted(path.name for path in (shared / "moved").iterdir()) == ["content", "journal0", "lock", "work"]
    publication.publish()
    publication.close()
    assert [path.name for path in (shared / "out").iterdir()] == ["file"]
    assert [path.name for path in victim.parent.iterdir()] == ["keys"]


def test_a_journal_is_used_only_with_its_bytes(tmp_path: Path) -> None:
    """Our own folder, but a journal whose checksums are those of zeros: what it speaks of is not what it was."""
    run, out = fixture_named("p02").run, tmp_path / "out"

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mcore_ckpt_ext.convert(run, out, mcore_ckpt_ext.Canonical(), workers=1, progress=stop)
    (partial,) = tmp_path.glob("out.partial-*")
    with (partial / "journal0").open("a") as journal:
        journal.writelines(f"{json.dumps([number, 12345])}\n" for number in range(1000))
    mcore_ckpt_ext.convert(run, out, mcore_ckpt_ext.Canonical(), resume=True)
    mcore_ckpt_ext.convert(run, tmp_path / "fresh", mcore_ckpt_ext.Canonical())
    for path in (tmp_path / "fresh").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_tensors_of_zeros_with_a_journal_that_vouches_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody makes the unfinished folder before its user does: whole, consistent in itself, and all zero."""
    run, out = fixture_named("p02").run, tmp_path / "out"

    def stop(done: int, total: int) -> None:
        if done >= total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mcore_ckpt_ext.convert(run, out, mcore_ckpt_ext.Canonical(), workers=1, progress=stop)
    (planted,) = tmp_path.glob("out.partial-*")
    with_zeros(planted)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(DestinationError, match="owned by another user"):
        mcore_ckpt_ext.convert(run, out, mcore_ckpt_ext.Canonical(), resume=True)
    assert not out.exists()


def with_zeros(unfinished: Path) -> None:
    """Fill all tensors with zeros, and the journal with the checksums of zeros."""
    lengths = {}
    for path in (unfinished / "content").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, tensor in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                first, last = (begin + offset for offset in tensor["data_offsets"])
                lengths[zlib.crc32(data[first:last])] = last - first
                data[first:last] = bytes(last - first)
        path.write_bytes(data)
    lines = [json.loads(line) for line in (unfinished / "journal0").read_text().splitlines()]
    known = [(number, zlib.crc32(bytes(lengths[crc]))) for number, crc in lines if crc in lengths]
    assert len(known) > len(lines) / 2
    (unfinished / "journal0").write_text("".join(f"[{number}, {crc}]\n" for number, crc in known))


def test_a_planted_link_for_a_small_file_is_not_followed(shared: Path, victim: Path) -> None:
    """The tracker of a run folder, which is replaced in one step."""
    (shared / "tracker.txt.partial").symlink_to(victim)
    replace_files({shared / "tracker.txt": "100"})
    assert (shared / "tracker.txt").read_text() == "100"
    assert victim.read_text() == "secret"
