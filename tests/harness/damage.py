"""Damages a checkpoint's files, and detects damage."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

import mcore_ckpt_ext
from mcore_ckpt_ext.formats.checkpoint import Checkpoint, open_checkpoint
from mcore_ckpt_ext.layout.additive_digest import digest_tensor, format_digest
from mcore_ckpt_ext.layout.sidecar import RecordedDigests
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.optimizers.model_space_state import ModelSpaceState
from mcore_ckpt_ext.optimizers.remainders import split
from mcore_ckpt_ext.storage.file_digests import FILE_NAME as DIGESTS_FILE
from mcore_ckpt_ext.storage.torch_archive import TorchArchive
from mcore_ckpt_ext.transfer import read_slice
from tests.harness.checkpoints import Fixture

_SCHEDULE, _COMMON, _ADDED = "opt_param_scheduler", "common_state/shard_0_1", "__90_0.distcp"
MATRIX = "decoder.layers.1.mlp.linear_fc1.weight"


def payload_position(checkpoint: Checkpoint, kind: str, name: str, element: int) -> tuple[Path, int]:
    """Return file and position of the first byte of one element of a tensor's first stored slice."""
    stored = checkpoint.stored_slices(kind, name)[0]
    payload = checkpoint.files.transfer.locate(stored.extent)
    size = payload.dtype.itemsize
    return checkpoint.files.folder / payload.file, payload.offset + (stored.first + element) * size


def flip(path: Path, position: int, bit: int = 0x40) -> None:
    """Flip one bit of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        (value,) = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ bit]))


def remove_schedule(folder: Path) -> None:
    """Remove the learning rate schedule of an iteration, wherever its format stores it."""
    for file in (*folder.glob("common.pt"), *folder.glob("*/model_optim_rng.pt")):
        state = torch.load(file, weights_only=False)
        del state[_SCHEDULE]
        torch.save(state, file)
    index = folder / ".metadata"
    if not index.exists() or (folder / "common.pt").exists():
        return
    metadata = pickle.loads(index.read_bytes())
    for key in [key for key in metadata.state_dict_metadata if key.startswith(f"{_SCHEDULE}.")]:
        del metadata.state_dict_metadata[key]
    if _COMMON in metadata.state_dict_metadata:
        place = metadata.storage_data[MetadataIndex(_COMMON)]
        stored = (folder / place.relative_path).read_bytes()[place.offset :][: place.length]
        (state,) = torch.load(io.BytesIO(stored), weights_only=False)
        del state[_SCHEDULE]
        torch.save([state], archive := io.BytesIO())
        (folder / _ADDED).write_bytes(archive.getvalue())
        metadata.storage_data[MetadataIndex(_COMMON)] = _StorageInfo(_ADDED, 0, len(archive.getvalue()))
    index.write_bytes(pickle.dumps(metadata))


def without_digests(folder: Path) -> Path:
    """Remove the digests of a folder's files, so that a test may edit the files."""
    (folder / DIGESTS_FILE).unlink(missing_ok=True)
    return folder


def read_all(run: Path) -> None:
    """Read every tensor of every kind."""
    checkpoint = open_checkpoint(run)
    for kind in checkpoint.kinds():
        for name in checkpoint.names(kind):
            checkpoint.tensor(kind, name).read()


def verify_checksums(checkpoint: Checkpoint) -> None:
    """Verify the checksums of all archives."""
    for file, offset, length in checkpoint.files.archives():
        TorchArchive(checkpoint.files.reader, file, offset, length).verify_checksums()


def wrong_masters(fixture: Fixture) -> set[str]:
    """Return parameters whose masters, read by the names of their arrays, differ from the live ones."""
    checkpoint = mcore_ckpt_ext.open_checkpoint(fixture.run)
    written = ModelSpaceState(checkpoint.files.index())
    wrong = set()
    for key, expected in fixture.truth.items():
        kind, _, name = key.partition(".")
        if kind == "fp32_param":
            whole = Slice.whole((Region.whole(name, tuple(expected.shape)),))
            stored = read_slice(written, checkpoint.files.transfer, kind, whole)
            wrong |= set() if torch.equal(stored, expected.reshape(-1)) else {name}
    return wrong


def recorded_digests(fixture: Fixture, *kinds: str) -> tuple[RecordedDigests, ...]:
    """Return the digests of a live state with remainders as masters, and those of further kinds, as a save records."""
    (buffers,) = open_checkpoint(fixture.run).optimizer.state().buffers
    of_groups = []
    for (child, index), group in buffers.groups.items():
        names = [placed.name for placements in buffers.packing_of(group).packing.values() for placed in placements]
        of_names = {}
        for name in names:
            state = {kind: fixture.truth[f"{kind}.{name}"].flatten() for kind in kinds}
            state["param_remainder"] = split(fixture.truth[f"fp32_param.{name}"].flatten())[1]
            of_names[name] = {kind: format_digest(digest_tensor(values)) for kind, values in state.items()}
        of_groups.append(RecordedDigests(child, index, of_names))
    return tuple(of_groups)
