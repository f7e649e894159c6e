"""Test manifests: copies match them, differences are named, and conversions keep all tensors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext import FsdpDtensor, Legacy, TorchDist
from mcore_ckpt_ext.communicator import ONE_PROCESS
from mcore_ckpt_ext.errors import UnreadableCheckpointError, UsageError
from mcore_ckpt_ext.operations import recording
from mcore_ckpt_ext.operations.findings import RECORDED_FILES, RECORDED_TENSORS, Verification
from mcore_ckpt_ext.operations.integrity import digest_of_file
from mcore_ckpt_ext.operations.recording import Digests, Recording
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.operations.workers import Workers
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.manifest import read_manifest
from mcore_ckpt_ext.targets import Target
from tests.harness.checkpoints import CORRUPTED, fixture_named
from tests.harness.colossalai_folders import colossalai_checkpoint
from tests.harness.damage import MATRIX, flip, payload_position
from tests.harness.huggingface import make
from tests.harness.peft import adapter, peft_folder
from tests.harness.teams import in_team

CHECKS = (RECORDED_FILES, RECORDED_TENSORS)


def differences(found: Verification) -> list[tuple[str, str]]:
    """Check and place of what is not as recorded."""
    return [(one.check, one.file or one.where) for one in found.findings if one.check in CHECKS]


def are_compared(found: Verification) -> bool:
    return {check.name for check in found.checks if check.done} >= {*CHECKS}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and its manifest."""
    manifest = tmp_path_factory.mktemp("recorded") / "manifest"
    run = fixture_named("p02").run
    found = mcore_ckpt_ext.verify(run, record=manifest)
    assert (found.sound, found.recorded) == (True, str(manifest))
    return run, manifest


@pytest.fixture
def copy(recorded: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded[0], tmp_path / "copy"))


def test_a_copy_is_as_recorded(recorded: tuple[Path, Path], copy: Path) -> None:
    found = mcore_ckpt_ext.verify(copy, against=recorded[1])
    assert (found.sound, differences(found), are_compared(found)) == (True, [], True)
    checked = subprocess.run(["sha256sum", "-c", "--quiet", recorded[1]], cwd=found.path, check=True, text=True)
    assert checked.returncode == 0


def test_files_that_are_missing_changed_or_more_are_named(recorded: tuple[Path, Path], copy: Path) -> None:
    iteration = Path(mcore_ckpt_ext.open_checkpoint(copy).files.folder)
    (iteration / "surplus").write_text("x")
    (iteration / "__0_0.distcp").unlink()
    with (iteration / "metadata.json").open("a") as stream:
        stream.write("\n")
    found = mcore_ckpt_ext.verify(copy, against=recorded[1])
    assert {file for check, file in differences(found) if check == RECORDED_FILES} == {
        "surplus", "__0_0.distcp", "metadata.json",
    }  # fmt: skip
    assert not found.sound


def test_a_flipped_bit_names_the_file_and_the_tensor(recorded: tuple[Path, Path], copy: Path) -> None:
    path, place = payload_position(mcore_ckpt_ext.open_checkpoint(copy), "exp_avg", MATRIX, 700)
    flip(path, place)
    found = mcore_ckpt_ext.verify(copy, against=recorded[1])
    assert differences(found) == [(RECORDED_FILES, path.name), (RECORDED_TENSORS, f"exp_avg {MATRIX}")]


@pytest.mark.thorough
@pytest.mark.parametrize("target", [TorchDist(), Legacy(tensor_model_parallel_size=4), FsdpDtensor()])
def test_a_conversion_keeps_all_tensors(target: Target, recorded: tuple[Path, Path], tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(recorded[0], tmp_path / "out", target)
    found = mcore_ckpt_ext.verify(tmp_path / "out", against=recorded[1], tensors_only=True)
    assert (found.sound, differences(found)) == (True, [])
    assert RECORDED_TENSORS in {check.name for check in found.checks if check.done}
    with_files = mcore_ckpt_ext.verify(tmp_path / "out", against=recorded[1])
    assert {check for check, _ in differences(with_files)} == {RECORDED_FILES}


def hugging_face(folder: Path) -> Path:
    make("llama", folder)
    return folder


def unknown_family(folder: Path) -> Path:
    config = json.loads((hugging_face(folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "novel", "architectures": ["Novel"]}))
    return folder


FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "hugging face": (hugging_face, "*.safetensors"),
    "unknown family": (unknown_family, "*.safetensors"),
    "peft": (lambda folder: peft_folder(folder, adapter("model.layers.0.self_attn.q_proj", 32, 32)), "*.safetensors"),
    "colossalai": (colossalai_checkpoint, "modeling/*-00001.bin"),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_formats_without_checksums_get_them(kind: str, tmp_path: Path) -> None:
    make_folder, pattern = FOLDERS[kind]
    folder, manifest = make_folder(tmp_path / "folder"), tmp_path / "manifest"
    assert mcore_ckpt_ext.verify(folder, record=manifest).recorded
    assert are_compared(mcore_ckpt_ext.verify(folder, against=manifest))
    file = next(folder.glob(pattern))
    flip(file, file.stat().st_size // 2, 1)
    found = mcore_ckpt_ext.verify(folder, against=manifest)
    assert (RECORDED_FILES, str(file.relative_to(folder))) in differences(found)
    assert RECORDED_TENSORS in {check for check, _ in differences(found)} or kind == "colossalai"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["p09", "p31", "p43", "p47", "p50"])
def test_every_kind_of_checkpoint_can_be_recorded(name: str, tmp_path: Path) -> None:
    run = fixture_named(name).run
    found = mcore_ckpt_ext.verify(run, record=tmp_path / "manifest")
    assert found.recorded
    # The tensors were digested while they were verified; reading them for that alone gives the same.
    checkpoint = mcore_ckpt_ext.open_checkpoint(run)
    recording = Recording(checkpoint.files.folder, checkpoint, Digests(), Workers(ONE_PROCESS, 2))
    assert recording.tensor_digests() == [*read_manifest(tmp_path / "manifest").tensors]
    found = mcore_ckpt_ext.verify(run, against=tmp_path / "manifest", tensors_only=True)
    assert (found.sound, differences(found)) == (True, [])


def test_recording_reads_verified_tensors_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read(*arguments: object) -> None:
        raise AssertionError(arguments)

    for tensors in (recording._ModelTensors, recording._StoredTensors):
        monkeypatch.setattr(tensors, "digest", read)
    for number, folder in enumerate((fixture_named("p02").run, unknown_family(tmp_path / "folder"))):
        assert mcore_ckpt_ext.verify(folder, record=tmp_path / f"manifest {number}").recorded


@pytest.mark.parametrize(("make_folder", "reads"), [(unknown_family, 1), (hugging_face, 2)])
def test_weights_are_read_once_to_compare_and_at_most_twice_to_record(
    make_folder: Callable[[Path], Path], reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, manifest = make_folder(tmp_path / "folder"), tmp_path / "manifest"
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    read: list[int] = []
    read_into = FolderReader.read_into

    def counted(reader: FolderReader, file: str, offset: int, buffer: memoryview) -> None:
        read.append(len(buffer))
        read_into(reader, file, offset, buffer)

    def digest_of_small_file(folder: Path, name: str) -> str:
        assert not name.endswith(".safetensors")
        return digest_of_file(folder, name)

    monkeypatch.setattr(FolderReader, "read_into", counted)
    monkeypatch.setattr(recording, "digest_of_file", digest_of_small_file)
    verify(folder, record=manifest)
    assert sum(read) < (reads + 0.5) * nbytes  # with headers, which several steps read
    read.clear()
    assert are_compared(verify(folder, against=manifest))
    assert sum(read) < 1.5 * nbytes
    subprocess.run(["sha256sum", "-c", "--quiet", manifest], cwd=folder, check=True)
    in_team(2, lambda team: verify(folder, record=tmp_path / "shared", team=team))
    assert (tmp_path / "shared").read_text() == manifest.read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3])
def test_processes_share_a_record_and_a_comparison(size: int, recorded: tuple[Path, Path], tmp_path: Path) -> None:
    run, manifest = recorded
    in_team(size, lambda team: verify(run, record=tmp_path / "shared", team=team))
    assert (tmp_path / "shared").read_text() == manifest.read_text()
    damaged = Path(shutil.copytree(run, tmp_path / "copy"))
    path, position = payload_position(mcore_ckpt_ext.open_checkpoint(damaged), "exp_avg", MATRIX, 3)
    flip(path, position)
    alone = verify(damaged, against=manifest)
    assert len(differences(alone)) == 2
    assert in_team(size, lambda team: verify(damaged, against=manifest, team=team)) == [alone] * size


def test_a_manifest_in_the_checkpoint_is_no_file_of_it(copy: Path) -> None:
    manifest = Path(mcore_ckpt_ext.open_checkpoint(copy).files.folder) / "SHA256SUMS"
    for _ in range(2):  # an earlier one is replaced
        mcore_ckpt_ext.verify(copy, record=manifest)
    assert differences(mcore_ckpt_ext.verify(copy, against=manifest)) == []


def test_a_file_name_that_is_not_unicode_is_recorded(copy: Path, tmp_path: Path) -> None:
    iteration = mcore_ckpt_ext.open_checkpoint(copy).files.folder
    (iteration / os.fsdecode(b"notes\xff")).write_text("x")
    mcore_ckpt_ext.verify(copy, record=tmp_path / "manifest")
    assert b"  notes\xff\n" in (tmp_path / "manifest").read_bytes()
    assert differences(mcore_ckpt_ext.verify(copy, against=tmp_path / "manifest")) == []


def test_damaged_checkpoints_are_not_recorded(tmp_path: Path) -> None:
    found = mcore_ckpt_ext.verify(fixture_named(CORRUPTED[0]).run, record=tmp_path / "manifest")
    assert (found.recorded, (tmp_path / "manifest").exists()) == (None, False)


def test_a_list_of_sha256sum_compares_files_alone(copy: Path, tmp_path: Path) -> None:
    iteration = mcore_ckpt_ext.open_checkpoint(copy).files.folder
    printed = subprocess.run("sha256sum * .metadata", shell=True, cwd=iteration, capture_output=True, text=True)
    (tmp_path / "list").write_text(printed.stdout)
    found = mcore_ckpt_ext.verify(copy, against=tmp_path / "list")
    assert (found.sound, differences(found), are_compared(found)) == (True, [], False)
    (iteration / "surplus").write_text("x")
    assert differences(mcore_ckpt_ext.verify(copy, against=tmp_path / "list")) == [(RECORDED_FILES, "surplus")]
    with pytest.raises(UsageError, match="no tensors to compare.*leave out --tensors-only"):
        mcore_ckpt_ext.verify(copy, against=tmp_path / "list", tensors_only=True)


def test_wrong_usage_is_refused_before_anything_is_read(copy: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("no manifest")
    with pytest.raises(UsageError, match="would overwrite"):
        mcore_ckpt_ext.verify(copy, record=precious)
    with pytest.raises(UsageError, match="does not exist"):
        mcore_ckpt_ext.verify(copy, record=tmp_path / "nowhere" / "manifest")
    with pytest.raises(UsageError, match="--quick"):
        mcore_ckpt_ext.verify(copy, quick=True, record=tmp_path / "manifest")
    with pytest.raises(UsageError, match="--tensors-only"):
        mcore_ckpt_ext.verify(copy, tensors_only=True)
    with pytest.raises(UnreadableCheckpointError, match="not a manifest"):
        mcore_ckpt_ext.verify(copy, against=precious)
    assert precious.read_text() == "no manifest"
