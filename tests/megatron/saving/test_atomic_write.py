"""Test what must be on disk before a save is committed, by an index made of torch's own classes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from mcore_ckpt_ext.megatron.saving import atomic_write
from mcore_ckpt_ext.megatron.saving.atomic_write import Disk, finished_iterations
from mcore_ckpt_ext.megatron.saving.validation import problems_on_disk, stored_bytes

TRACKER = "latest_checkpointed_iteration.txt"
disk = Disk()


def index_of_two_ranks() -> dcp.Metadata:
    """A weight of two chunks and an object, of 100 bytes each, in one file a rank."""
    chunks = [dcp.ChunkStorageMetadata(torch.Size([first]), torch.Size([4])) for first in (0, 4)]
    entries = {
        "weight": dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), torch.Size([8]), chunks),
        "state": dcp.BytesStorageMetadata(),
    }
    records = {
        dcp.MetadataIndex("weight", [0]): _StorageInfo("__0_0.distcp", 0, 100),
        dcp.MetadataIndex("weight", [4]): _StorageInfo("__1_0.distcp", 0, 100),
        dcp.MetadataIndex("state"): _StorageInfo("__0_0.distcp", 100, 100),
    }
    return dcp.Metadata(entries, storage_data=records)


def written(folder: Path) -> Path:
    (folder / "__0_0.distcp").write_bytes(bytes(200))
    (folder / "__1_0.distcp").write_bytes(bytes(100))
    return folder


def test_a_whole_checkpoint_has_no_problem(tmp_path: Path) -> None:
    index = index_of_two_ranks()
    assert list(problems_on_disk(index, written(tmp_path))) == []
    assert stored_bytes(index) == 300


@pytest.mark.parametrize(
    ("index", "name"), [(dcp.MetadataIndex("weight", [4]), "weight"), (dcp.MetadataIndex("state"), "state")]
)
def test_a_record_that_no_rank_wrote_is_named(index: dcp.MetadataIndex, name: str, tmp_path: Path) -> None:
    metadata = index_of_two_ranks()
    (metadata.storage_data or {}).pop(index)
    problems = list(problems_on_disk(metadata, written(tmp_path)))
    assert problems == [f"1 of 3 records were not written by any rank, first {name}"]


def test_a_file_that_is_gone_or_cut_off_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "__0_0.distcp").write_bytes(bytes(199))
    (folder / "__1_0.distcp").unlink()
    assert list(problems_on_disk(index_of_two_ranks(), folder)) == [
        "__0_0.distcp: 199 bytes, but its records need 200 bytes",
        "__1_0.distcp: it does not exist, but its records need 100 bytes",
    ]


def run_of(folder: Path, *iterations: int, latest: int) -> Path:
    for iteration in iterations:
        (folder / f"iter_{iteration:07d}").mkdir(parents=True)
        (folder / f"iter_{iteration:07d}" / "metadata.json").write_text("{}")
    (folder / TRACKER).write_text(str(latest))
    return folder


def test_saving_over_a_checkpoint_points_the_tracker_to_another_first(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 2, 4, latest=4)
    (tmp_path / "before").hardlink_to(run / TRACKER)
    disk.prepare(run / "iter_0000004", run / TRACKER)
    assert (run / TRACKER).read_text() == "2"
    assert (tmp_path / "before").read_text() == "4"  # replaced, not written over
    assert finished_iterations(run) == [2]


def test_saving_over_a_checkpoint_never_points_the_tracker_to_what_a_rollback_left(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 2, 4, 8, latest=4)
    disk.prepare(run / "iter_0000004", run / TRACKER)
    assert (run / TRACKER).read_text() == "2"


def test_saving_over_the_only_checkpoint_leaves_no_tracker(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 4, latest=4)
    disk.prepare(run / "iter_0000004", run / TRACKER)
    assert not (run / TRACKER).exists()


def test_saving_over_the_release_that_the_tracker_names_withdraws_it(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 2, latest=2)
    (run / "release").mkdir()
    (run / "release" / "metadata.json").write_text("{}")
    (run / TRACKER).write_text("release")
    disk.prepare(run / "release", run / TRACKER)
    assert (run / TRACKER).read_text() == "2"
    assert list((run / "release").iterdir()) == []


def test_leftovers_of_an_interrupted_save_are_removed(tmp_path: Path) -> None:
    """Its sidecar tells of buffers that are no longer there."""
    run = run_of(tmp_path / "run", 2, latest=2)
    (run / "iter_0000004").mkdir()
    for name in (".metadata", "mcore_ckpt_ext.json"):
        (run / "iter_0000004" / name).write_text("{}")
    disk.prepare(run / "iter_0000004", run / TRACKER)
    assert list((run / "iter_0000004").iterdir()) == []


def test_a_disk_that_refuses_leaves_what_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path / "run", 2, 4, latest=4)

    def write_bytes(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    for iteration in (4, 6):
        with pytest.raises(OSError, match="quota"):
            disk.prepare(run / f"iter_{iteration:07d}", run / TRACKER)
    assert (run / TRACKER).read_text() == "4"
    assert finished_iterations(run) == [4, 2]
    assert not (run / "iter_0000006").exists()


def test_all_is_flushed_that_megatrons_writers_do_not_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_of(tmp_path / "run", 2, latest=2) / "iter_0000002"
    for name in ("common.pt", ".metadata", "__0_0.distcp"):
        (folder / name).write_text("")
    flushed: list[str] = []
    monkeypatch.setattr(atomic_write, "flush_all", lambda paths: flushed.extend(path.name for path in paths))
    disk.settle(folder)
    assert sorted(flushed) == [".metadata", "common.pt", "iter_0000002", "metadata.json", "run"]


def test_a_new_folder_changes_nothing_else(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 2, latest=2)
    disk.prepare(run / "iter_0000004", run / TRACKER)
    assert (run / TRACKER).read_text() == "2"
    assert list((run / "iter_0000004").iterdir()) == []


def test_discard_removes_only_its_folders(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 2, 4, latest=2)
    disk.discard([run / "iter_0000004"])
    assert finished_iterations(run) == [2]
    assert not (run / "iter_0000004").exists()


def test_publishing_that_fails_leaves_the_tracker_and_nothing_else(tmp_path: Path) -> None:
    """The folder is gone, as after a failed mount."""
    run = run_of(tmp_path / "run", 2, latest=2)
    with pytest.raises(FileNotFoundError):
        disk.publish(run / "iter_0000004", "{}", run / TRACKER, "4")
    assert (run / TRACKER).read_text() == "2"
    assert sorted(path.name for path in run.rglob("*") if path.is_file()) == [TRACKER, "metadata.json"]


def test_settle_requires_the_index(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 2, latest=2)
    disk.settle(run / "iter_0000002")
    (run / "iter_0000004").mkdir()
    with pytest.raises(FileNotFoundError):
        disk.settle(run / "iter_0000004")


def test_published_are_the_sidecar_and_the_tracker(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 2, 4, latest=2)
    disk.publish(run / "iter_0000004", "{}", run / TRACKER, "4")
    assert (run / TRACKER).read_text() == "4"
    assert sorted(path.name for path in (run / "iter_0000004").iterdir()) == ["mcore_ckpt_ext.json", "metadata.json"]
