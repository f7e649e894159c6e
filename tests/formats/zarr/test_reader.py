"""Tests that damaged and foreign zarr checkpoints are refused; `test_fixtures.py` reads intact ones."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext import Canonical, convert
from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.torch_dist.stacked_weights import StackedWeights
from mcore_ckpt_ext.formats.zarr.reader import ZarrCheckpoint, read_index
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.transfer import Transfer, read_slice
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.open_files import open_files

MATRIX = "decoder.layers.mlp.linear_fc1.weight"
MASTER = f"optimizer.state.fp32_param.{MATRIX}"


@pytest.fixture
def copied(tmp_path: Path) -> Fixture:
    """Return a private copy of p33 to damage."""
    return fixture_named("p33").copy_to(tmp_path / "p33")


def read_all(fixture: Fixture) -> None:
    checkpoint = open_checkpoint(fixture.run)
    for kind in checkpoint.kinds():
        for name in checkpoint.names(kind):
            checkpoint.tensor(kind, name).read()


def described(**values: object) -> Callable[[Path], None]:
    """Change values in the description of an array."""

    def damage(array: Path) -> None:
        path = array / ".zarray"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def lacking(name: str) -> Callable[[Path], None]:
    return lambda array: (array / name).unlink()


def shortened(array: Path) -> None:
    os.truncate(array / "0.1.0", 100)


def lengthened(array: Path) -> None:
    with (array / "0.1.0").open("ab") as file:
        file.write(b"more")


def garbage(array: Path) -> None:
    (array / ".zarray").write_text("[1, 2]")


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (lacking("1.2.0"), UnreadableCheckpointError, "lacks chunks; found: 7 of them; expected: 8"),
        (shortened, UnreadableCheckpointError, r"another size than .* says.*found: 100 bytes; expected: .*0\.1\.0"),
        (lengthened, UnreadableCheckpointError, r"another size than .* says.*0\.1\.0"),
        *(
            (described(dtype=dtype), UnreadableCheckpointError, "another size than .* says.*for " + name)
            for dtype, name in (("<f2", "float16"), ("|b1", "bool"), ("|u1", "uint8"), ("bfloat16", "bfloat16"))
        ),
        (described(dtype="<i4"), UnreadableCheckpointError, "dtype that no optimizer keeps.*of int32"),
        (garbage, UnreadableCheckpointError, "description of an array is damaged"),
        (described(shape=[10**8, 10**6, 32]), UnreadableCheckpointError, "lacks chunks"),
        (described(shape=[10**9, 10**9, 32]), UnreadableCheckpointError, "description of an array is damaged"),
        (described(chunks=[1, 0, 32]), UnsupportedCheckpointError, "not stored as Megatron stores it"),
        (described(chunks=[1, 32]), UnsupportedCheckpointError, "not stored as Megatron stores it"),
        (described(chunks=[1, 30, 32]), UnsupportedCheckpointError, "in chunks that fill it"),
        (described(compressor={"id": "blosc"}), UnsupportedCheckpointError, "uncompressed"),
        (described(order="F"), UnsupportedCheckpointError, "'order': 'F'"),
        (described(dtype="<c8"), UnsupportedCheckpointError, "<c8"),
    ],
)
def test_damage_is_refused(
    damage: Callable[[Path], None], error: type[CheckpointError], says: str, copied: Fixture
) -> None:
    damage(copied.iteration / MASTER)
    with pytest.raises(error, match=says):
        read_all(copied)


@pytest.mark.parametrize("kind", ["fp32_param", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("dtype", ["<f2", "|b1", "<i4", "|u1", "bfloat16"])
def test_another_dtype_is_not_sound_and_not_converted(kind: str, dtype: str, copied: Fixture, tmp_path: Path) -> None:
    """Nothing else contradicts it: an array of zarr has no checksum."""
    described(dtype=dtype)(copied.iteration / f"optimizer.state.{kind}.{MATRIX}")
    assert not verify(copied.run, quick=True).sound
    with pytest.raises(UnreadableCheckpointError):
        convert(copied.run, tmp_path / "out", Canonical())


def test_an_exchange_of_two_chunks_is_seen_by_the_proof(copied: Fixture) -> None:
    array = copied.iteration / MASTER
    first, second = (array / "0.0.0").read_bytes(), (array / "0.1.0").read_bytes()
    (array / "0.0.0").write_bytes(second)
    (array / "0.1.0").write_bytes(first)
    with pytest.raises(CheckpointError, match="does not round to its weight"):
        read_all(copied)


def test_a_last_chunk_may_reach_beyond_the_array(tmp_path: Path) -> None:
    """With `allow_shape_mismatch`, the tensor-parallel size need not divide the rows."""
    array = tmp_path / "embedding.word_embeddings.weight"
    array.mkdir()
    plain = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C", "fill_value": None}
    (array / ".zarray").write_text(json.dumps({"shape": [5, 3], "chunks": [2, 3], "dtype": "<f4", **plain}))
    values = torch.arange(18, dtype=torch.float32)
    for number in range(3):
        (array / f"{number}.0").write_bytes(values[6 * number : 6 * number + 6].numpy().tobytes())
    weights = StackedWeights(read_index(tmp_path).arrays)
    whole = Slice.whole((Region.whole(array.name, (5, 3)),))
    assert read_slice(weights, Transfer(FolderReader(tmp_path)), "weight", whole).equal(values[:15])


def test_more_files_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = [str(number) for number in range(limit + 100 if limit < 20_000 else 2000)]
    for file in files:
        (tmp_path / file).write_bytes(file.encode())
    with FolderReader(tmp_path) as reader:
        assert all(reader.read(file, 0, len(file)) == file.encode() for file in files)
        assert 0 < open_files(tmp_path) <= 256
    assert open_files(tmp_path) == 0


def test_a_folder_that_is_none_is_not_taken_for_one(tmp_path: Path) -> None:
    assert not ZarrCheckpoint.recognizes(FolderIndex(tmp_path))
    assert not ZarrCheckpoint.recognizes(FolderIndex(fixture_named("p01").iteration))
    assert ZarrCheckpoint.recognizes(FolderIndex(fixture_named("p31").iteration))
