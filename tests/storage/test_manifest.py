"""Test the text of a manifest: it round-trips, `sha256sum` reads its files, and damage is refused."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.storage.manifest import Manifest, TensorDigest, differing_tensors, manifest_text, read_manifest

DIGEST, OTHER = ("0123456789abcdef" * 4, "f" * 64)
TENSOR = TensorDigest("weight", "decoder.final_norm.weight", "bfloat16", (3, 0), DIGEST)
NAMES = ["common.pt", "a folder/with spaces", "back\\slash", "line\nbreak", "#hash", "carriage\rreturn"]
MANIFEST = Manifest(
    dict.fromkeys(sorted(NAMES), DIGEST), (TENSOR, TensorDigest("exp_avg", "a\nb", "float32", (), OTHER))
)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_it_comes_back(tmp_path: Path) -> None:
    assert read_manifest(written(tmp_path / "manifest", manifest_text(MANIFEST))) == MANIFEST


def test_manifests_are_interchangeable_with_sha256sum(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "a folder").mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_text(name)
    files = {name: hashlib.sha256(name.encode()).hexdigest() for name in NAMES}
    manifest = written(tmp_path / "manifest", manifest_text(Manifest(files, MANIFEST.tensors)))
    checked = subprocess.run(["sha256sum", "--check", "--strict", manifest], cwd=folder, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout.count(": OK"), checked.stderr) == (0, len(NAMES), "")
    printed = subprocess.run(
        ["sha256sum", *(f"./{name}" for name in NAMES)], cwd=folder, capture_output=True, text=True
    )
    assert read_manifest(written(tmp_path / "theirs", printed.stdout)) == Manifest(files, (), has_tensors=False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{DIGEST}  common.pt\n", ""),
        ("common.pt", "../common.pt"),
        ("common.pt", "/common.pt"),
        ("common.pt", "x/" * 2500),
        (DIGEST[:8], "xxxxxxxx"),
        ("# end", "# middle"),
        ('"shape": [3, 0]', '"shape": [3, -1]'),
        ('"shape": [3, 0]', '"shape": 3'),
        ('"dtype": "bfloat16", ', ""),
        (manifest_text(MANIFEST), f"{DIGEST}  a\n{DIGEST[::-1]}  a\n"),
        (manifest_text(MANIFEST)[-40:], ""),
        (manifest_text(MANIFEST), "# nothing\n"),
        (manifest_text(MANIFEST), ""),
    ],
)
def test_a_damaged_one_is_refused(old: str, new: str, tmp_path: Path) -> None:
    text = manifest_text(MANIFEST)
    assert old in text
    with pytest.raises(UnreadableCheckpointError, match="not a manifest"):
        read_manifest(written(tmp_path / "manifest", text.replace(old, new)))


def test_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpointError, match="cannot be read"):
        read_manifest(tmp_path / "nothing")


def test_differences_of_tensors() -> None:
    changed = TensorDigest(TENSOR.kind, TENSOR.name, TENSOR.dtype, TENSOR.shape, OTHER)
    cast = TensorDigest(TENSOR.kind, TENSOR.name, "float32", TENSOR.shape, DIGEST)
    extra = TensorDigest("exp_avg", TENSOR.name, "float32", TENSOR.shape, DIGEST)
    assert differing_tensors([TENSOR], [TENSOR]) == []
    found = [
        what for other in ([], [changed], [cast], [TENSOR, extra]) for _, what in differing_tensors([TENSOR], other)
    ]
    assert [what.partition(":")[0].partition(" (")[0] for what in found] == [
        "missing", f"its SHA-256 is {OTHER[:16]}..., recorded is {DIGEST[:16]}...", "it is float32",
        "it is not recorded",
    ]  # fmt: skip
