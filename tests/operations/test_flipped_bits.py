"""Test that flipped bits in the folders of this package are noticed if they change the content."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext import Canonical, FsdpDtensor, HuggingFace, Legacy, TorchDist
from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError
from mcore_ckpt_ext.operations.findings import CHECKSUMS, FILE_DIGESTS
from mcore_ckpt_ext.storage.checkpoint_dirs import iteration_folder
from mcore_ckpt_ext.storage.file_digests import FILE_NAME, compare_digests
from mcore_ckpt_ext.storage.json_tree import encode
from mcore_ckpt_ext.targets import Target
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import flip

FLIPS = 16
FOLDERS: dict[str, Callable[[], Target]] = {
    "canonical": Canonical,
    "torch_dist": lambda: TorchDist(megatron_version="0.19.0"),
    "torch_dist before 0.19": lambda: TorchDist(megatron_version="0.12.0"),
    "bridge": lambda: TorchDist(loop="bridge"),
    "fsdp_dtensor": FsdpDtensor,
    "legacy": Legacy,
    "hugging face": HuggingFace,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each folder, written once."""
    folder = tmp_path_factory.mktemp("written")

    def of(name: str) -> Path:
        if not (folder / name).exists():
            mcore_ckpt_ext.convert(fixture_named("p02").run, folder / name, FOLDERS[name]())
        return folder / name

    return of


def content(folder: Path) -> Any:
    """All that a reader would take up of a folder."""
    checkpoint = mcore_ckpt_ext.open_checkpoint(folder)
    tensors = {
        f"{kind} {name}": checkpoint.tensor(kind, name).read()
        for kind in checkpoint.kinds()
        for name in checkpoint.names(kind)
    }
    digests = {
        key: (str(values.dtype), tuple(values.shape), values.reshape(-1).view(torch.uint8).numpy().tobytes())
        for key, values in tensors.items()
    }
    groups = checkpoint.optimizer.param_groups() if checkpoint.optimizer.format() else []
    states = (
        dict(checkpoint.states.extra()),
        list(checkpoint.states.random().items()),
        checkpoint.optimizer.grad_scaler(),
    )
    return digests, json.dumps(encode([dict(checkpoint.job.common()), groups, *states]))


def is_noticed(folder: Path, scratch: Path) -> bool:
    """Whether `verify`, and the conversion of a Hugging Face folder, report that something is wrong."""
    noticed = is_noticed_by_verify(folder)
    if not (folder / "config.json").exists():
        return noticed
    try:
        report = mcore_ckpt_ext.convert(folder, scratch, Canonical(), force=True)
    except CheckpointError:
        return noticed
    return noticed and any("has changed since it was written" in note for note in report.notes)


def is_noticed_by_verify(folder: Path) -> bool:
    try:
        found = mcore_ckpt_ext.verify(folder)
    except CheckpointError:
        return True
    return not found.sound or any(finding.check == FILE_DIGESTS for finding in found.findings)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FOLDERS)
def test_a_flipped_bit_that_changes_the_content_is_noticed(
    name: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(written(name), folder)
    assert not is_noticed(folder, tmp_path / "scratch")
    before = content(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    chance = random.Random(name)
    for number in range(FLIPS):
        path = files[number % len(files)]
        place, bit = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
        flip(path, place, bit)
        if not is_noticed(folder, tmp_path / "scratch"):
            assert content(folder) == before, f"bit {bit} of byte {place} of {path.relative_to(folder)}"
        flip(path, place, bit)


CHANGES = {"lr": ('"lr": 0.00', '"lr": 0.10'), "wd_mult": ('"wd_mult": 1.0', '"wd_mult": 3.0')}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_setting_of_a_canonical_folder_is_refused(
    what: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(written("canonical"), folder)
    before, after = CHANGES[what]
    text = (folder / "common.json").read_text()
    assert before in text
    (folder / "common.json").write_text(text.replace(before, after, 1))
    found = mcore_ckpt_ext.verify(folder)
    assert [(finding.severity, finding.check) for finding in found.findings] == [("error", FILE_DIGESTS)]
    with pytest.raises(UnreadableCheckpointError, match=r"has changed since it was written.*common\.json"):
        mcore_ckpt_ext.convert(folder, tmp_path / "out", Canonical())
    (folder / FILE_NAME).unlink()  # edited on purpose, as the message suggests
    (folder / "common.json").write_text(text.replace(before, after))  # all copies, or they contradict each other
    mcore_ckpt_ext.convert(folder, tmp_path / "out", Canonical())


def test_every_bit_of_an_fsdp_index_counts(written: Callable[[str], Path], tmp_path: Path) -> None:
    """A name in it has no other copy to contradict it."""
    folder = tmp_path / "folder"
    shutil.copytree(written("fsdp_dtensor"), folder)
    index = iteration_folder(folder) / ".metadata"
    for place in random.Random(7).sample(range(index.stat().st_size), 50):
        flip(index, place, 1)
        with pytest.raises(UnreadableCheckpointError, match=r"has changed since it was written.*\.metadata"):
            mcore_ckpt_ext.open_checkpoint(folder)
        flip(index, place, 1)


def test_tensors_of_a_hugging_face_folder_have_checksums(written: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(written("hugging face"), folder)
    flip(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 100, 1)
    with pytest.raises(UnreadableCheckpointError, match="its checksum differs"):
        mcore_ckpt_ext.convert(folder, tmp_path / "out", Canonical())


def test_a_hugging_face_folder_is_verified_by_its_own_checksums(written: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(written("hugging face"), folder)
    found = mcore_ckpt_ext.verify(folder)
    assert (found.sound, found.findings) == (True, ())
    assert {check.name for check in found.checks if check.done} >= {FILE_DIGESTS, CHECKSUMS}
    flip(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 100, 1)
    assert [(one.severity, one.check) for one in mcore_ckpt_ext.verify(folder).findings] == [("error", CHECKSUMS)]


def test_an_edited_configuration_is_reported_and_taken(written: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(written("hugging face"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    report = mcore_ckpt_ext.convert(folder, tmp_path / "out", Canonical())
    (note,) = (note for note in report.notes if "has changed since it was written" in note)
    assert "config.json" in note


def test_digests_of_a_save_that_was_written_over_are_reported_as_stale(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    """A job saves the same iteration into a folder that was converted."""
    folder = tmp_path / "folder"
    shutil.copytree(written("torch_dist"), folder)
    iteration = iteration_folder(folder)
    digests = (iteration / FILE_NAME).read_bytes()
    shutil.rmtree(iteration)
    shutil.copytree(fixture_named("p02").iteration, iteration)
    (iteration / FILE_NAME).write_bytes(digests)
    found = mcore_ckpt_ext.verify(folder)
    assert found.sound
    (check,) = (check for check in found.checks if check.name == FILE_DIGESTS)
    assert not check.done
    mcore_ckpt_ext.open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "mcore_ckpt_ext digests"}'])
def test_digests_that_are_none_are_an_error(text: str, written: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(written("canonical"), folder)
    (folder / FILE_NAME).write_text(text)
    with pytest.raises(UnreadableCheckpointError, match="digests"):
        compare_digests(folder)
    assert not mcore_ckpt_ext.verify(folder).sound
