"""Test that a whole file of another conversion or iteration is found, although it is intact."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mcore_ckpt_ext
from mcore_ckpt_ext import Canonical, FsdpDtensor, HuggingFace, Legacy, TorchDist
from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.operations.findings import FILE_DIGESTS
from mcore_ckpt_ext.storage.file_digests import FILE_NAME, changed_checksums
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.targets import Target
from tests.harness.checkpoints import fixture_named

FORMATS: dict[str, Callable[[], Target]] = {
    "canonical": Canonical,
    "torch_dist": lambda: TorchDist(megatron_version="0.19.0"),
    "fsdp_dtensor": FsdpDtensor,
    "legacy": Legacy,
    "hugging face": lambda: HuggingFace(max_shard_size=100_000),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints that differ in all values and in nothing else."""
    first, second = (tmp_path_factory.mktemp("sources") / name for name in ("first", "second"))
    mcore_ckpt_ext.convert(fixture_named("p02").run, first, Canonical())
    shutil.copytree(first, second)
    (second / FILE_NAME).unlink()
    (file,) = second.glob("*.safetensors")
    arrays = load_file(file)
    del arrays["checksums"]
    doubled = {key: values * 2 if values.is_floating_point() else values for key, values in arrays.items()}
    checksums = [zlib.crc32(doubled[key].contiguous().view(torch.uint8).numpy().tobytes()) for key in sorted(doubled)]
    save_file({**doubled, "checksums": torch.tensor(checksums).to(torch.uint32).view(torch.int32)}, file)
    return first, second


@pytest.mark.parametrize(
    "name",
    [
        *("canonical", "torch_dist", "hugging face"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("fsdp_dtensor", "legacy")),
    ],
)
def test_a_file_of_another_conversion_is_found(name: str, sources: tuple[Path, Path], tmp_path: Path) -> None:
    folders = [tmp_path / source.name for source in sources]
    for source, folder in zip(sources, folders, strict=True):
        # Masters in legacy files of their own show the difference, too.
        mcore_ckpt_ext.convert(source, folder, FORMATS[name](), drop="optimizer" if name == "legacy" else ())
        assert mcore_ckpt_ext.verify(folder).sound
    ours, others = folders
    files = [path for suffix in ("*.distcp", "*.safetensors", "*.pt") for path in sorted(others.rglob(suffix))]
    replaced = [path.relative_to(others) for path in files if path.name != "common.pt"]
    assert replaced
    for file in replaced:
        kept = (ours / file).read_bytes()
        shutil.copy(others / file, ours / file)
        problems = mcore_ckpt_ext.verify(ours).findings
        (named,) = [problem.file for problem in problems if problem.check == FILE_DIGESTS]
        assert named is not None
        assert str(file).endswith(named)
        with pytest.raises(CheckpointError, match="belongs to another one"):
            mcore_ckpt_ext.convert(ours, tmp_path / "converted", Canonical())
        (ours / file).write_bytes(kept)
    assert mcore_ckpt_ext.verify(ours).sound


def test_of_files_without_a_record_no_archive_is_opened(tmp_path: Path) -> None:
    """As in a store, where each would be two requests."""
    unreadable = [("__0_0.distcp", 0, 1)]  # no file is there
    assert changed_checksums({"__0_0.distcp": "0" * 64}, FolderReader(tmp_path), unreadable, []) == []
    with pytest.raises(CheckpointError):
        changed_checksums({"__0_0.distcp": "1" * 64}, FolderReader(tmp_path), unreadable, [])
