"""Test checkpoints that torch saved without checksums, after `torch.serialization.set_crc32_options(False)`."""

from __future__ import annotations

import io
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt_ext import TorchDist
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.megatron.live.compatibility import verify_checksums
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.findings import CHECKSUMS
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.te_extra_state import read_state
from mcore_ckpt_ext.storage.torch_archive import TorchArchive
from mcore_ckpt_ext.storage.zip_directory import plain_directory
from tests.harness.checkpoints import Fixture, assert_is_the_truth, fixture_named


def without_checksums(archive: bytes) -> bytes:
    """Return an archive with zeros for all checksums, as torch writes it."""
    content, directory = bytearray(archive), plain_directory(archive, len(archive))
    assert directory is not None
    for place in directory.checksums:
        content[place : place + 4] = bytes(4)
    return bytes(content)


def saved(tree: Any) -> bytes:
    """Let torch save without checksums; 2.4 and 2.5 always write them."""
    stream = io.BytesIO()
    set_options = getattr(torch.serialization, "set_crc32_options", lambda _: None)
    set_options(False)
    torch.save(tree, stream)
    set_options(True)
    return (
        stream.getvalue() if hasattr(torch.serialization, "set_crc32_options") else without_checksums(stream.getvalue())
    )


def erase_checksums(fixture: Fixture) -> None:
    """Replace the checksums of all archives of a checkpoint by zeros."""
    archives = sorted(open_checkpoint(fixture.run).files.archives())
    archives += [(path.name, 0, path.stat().st_size) for path in fixture.iteration.glob("common.pt")]
    for file, places in groupby(archives, key=itemgetter(0)):
        content = bytearray((fixture.iteration / file).read_bytes())
        for _, offset, length in places:
            content[offset : offset + length] = without_checksums(bytes(content[offset : offset + length]))
        (fixture.iteration / file).chmod(0o644)
        (fixture.iteration / file).write_bytes(content)


def test_an_archive_of_torch_is_read(tmp_path: Path) -> None:
    (tmp_path / "file.pt").write_bytes(saved({"a": torch.arange(5.0), "b": torch.ones(3)}))
    archive = TorchArchive(FolderReader(tmp_path), "file.pt")
    assert not archive.has_checksums
    archive.verify_checksums()
    assert torch.equal(archive.with_values(archive.load())["a"], torch.arange(5.0))


def test_an_extra_state_of_transformer_engine_1_is_read() -> None:
    state = read_state(saved({"scale_fwd": torch.arange(3.0)}))
    assert state is not None
    assert torch.equal(state["scale_fwd"], torch.arange(3.0))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["p01", "p08"])
def test_a_checkpoint_is_read_and_converted(name: str, tmp_path: Path) -> None:
    copied = fixture_named(name).copy_to(tmp_path / "copy")
    erase_checksums(copied)
    assert_is_the_truth(open_checkpoint(copied.run), copied)
    verify_checksums(open_checkpoint(copied.run), 0, 1)
    found = verify(copied.run)
    assert found.sound
    (check,) = (check for check in found.checks if check.name == CHECKSUMS)
    assert (check.done, check.extent.endswith("a flipped bit of a moment is not detected")) == (False, True)
    convert(copied.run, tmp_path / "out", TorchDist())
    assert compare(copied.run, tmp_path / "out").tensors_equal
    assert all(check.done for check in verify(tmp_path / "out").checks)


def test_a_single_zero_is_a_damaged_checksum(tmp_path: Path) -> None:
    torch.save(torch.arange(5.0), tmp_path / "file.pt")
    content = bytearray((tmp_path / "file.pt").read_bytes())
    directory = plain_directory(bytes(content), len(content))
    assert directory is not None
    content[directory.checksums[0] : directory.checksums[0] + 4] = bytes(4)
    (tmp_path / "file.pt").write_bytes(content)
    archive = TorchArchive(FolderReader(tmp_path), "file.pt")
    with pytest.raises(CheckpointError, match="its checksum differs"):
        archive.load()
