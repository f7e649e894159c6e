"""Keys that nobody knows, in checkpoints of several formats."""

from __future__ import annotations

import io
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

LOST, OTHER = "optimizer.mystery", "mystery"
STRANGE = torch.arange(3.0)


def add_to_torch_dist(folder: Path) -> None:
    """An array of an optimizer and an object of nobody, as torch's own writer would store them."""
    (folder / ".metadata").chmod(0o644)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for name, key, value in (("__90_0.distcp", LOST, STRANGE), ("__91_0.distcp", f"{OTHER}/shard_0_1", [STRANGE])):
        archive = io.BytesIO()
        torch.save(value, archive)
        (folder / name).write_bytes(archive.getvalue())
        place = _StorageInfo(name, 0, len(archive.getvalue()))
        if isinstance(value, torch.Tensor):
            chunks = [ChunkStorageMetadata(offsets=torch.Size([0]), sizes=value.shape)]
            entry = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, chunks)
            metadata.storage_data[MetadataIndex(key, torch.Size([0]))] = place
        else:
            entry = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(key)] = place
        metadata.state_dict_metadata[key] = entry
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def add_to_plain_dcp(folder: Path) -> None:
    """An array of an optimizer, with the bytes of another that is stored."""
    path = folder / ".metadata"
    path.chmod(0o644)
    metadata = pickle.loads(path.read_bytes())
    like = next(key for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata))
    metadata.state_dict_metadata[LOST] = metadata.state_dict_metadata[like]
    places = {replace(key, fqn=LOST): place for key, place in metadata.storage_data.items() if key.fqn == like}
    metadata.storage_data |= places
    path.write_bytes(pickle.dumps(metadata))


def add_to_zarr(folder: Path) -> None:
    """An array, and an object beside it, under names of nobody."""
    array = next(path.parent for path in sorted(folder.glob("*/.zarray")))
    shutil.copytree(array, folder / LOST)
    extra = next(path for path in sorted(folder.iterdir()) if path.name.endswith("._extra_state"))
    shutil.copytree(extra, folder / OTHER)


def add_to_legacy(folder: Path) -> None:
    """Beside the parameter groups of every rank, and beside its model."""
    for file in folder.glob("*/model_optim_rng.pt"):
        file.chmod(0o644)
        state = torch.load(file, weights_only=False)
        state["optimizer"]["mystery"] = STRANGE
        state["mystery"] = STRANGE
        torch.save(state, file)
