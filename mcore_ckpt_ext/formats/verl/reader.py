"""Reads verl's step folder: joins `torch_dist` checkpoints of model, optimizer and the rest.

Source: verl/utils/checkpoint/megatron_checkpoint_manager.py of verl 0.9.1 (`model/dist_ckpt`, `optimizer/dist_ckpt`,
`extra/dist_ckpt`) and of the development head of 29 January 2026 (`dist_ckpt` for all).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.formats.backend import CONFIG_FILE
from mcore_ckpt_ext.formats.open_options import OpenOptions
from mcore_ckpt_ext.formats.torch_dist.reader import COMMON_OBJECT, TorchDistCheckpoint
from mcore_ckpt_ext.job.loops.verl import DISTRIBUTED
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE, FolderIndex
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex
from mcore_ckpt_ext.storage.index_entries import StoredArray, StoredObject

_PARTS = tuple(f"{part}/{DISTRIBUTED}" for part in ("model", "optimizer", "extra"))


def _parts(folder: Path) -> list[str]:
    return [part for part in (*_PARTS, DISTRIBUTED) if (folder / part / CONFIG_FILE).exists()]


class VerlCheckpoint(TorchDistCheckpoint):
    """The checkpoints of one step; file names are relative to the step's folder."""

    @classmethod
    @override
    def recognizes(cls, stored: FolderIndex) -> bool:
        has_metadata = any((stored.folder / name).exists() for name in (CONFIG_FILE, METADATA_FILE))
        return not has_metadata and bool(_parts(stored.folder))

    @override
    def _read_index(self) -> DcpIndex:
        arrays: dict[str, StoredArray] = {}
        objects: dict[str, StoredObject] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for part in _parts(self.folder):
            index = self.folder_index.below(part).content
            arrays |= {key: _below(part, array) for key, array in index.arrays.items()}
            shapes |= index.natural_shapes
            places = {key: place._replace(file=f"{part}/{place.file}") for key, place in index.objects.items()}
            objects |= {key: place for key, place in places.items() if key != COMMON_OBJECT}
        return DcpIndex(arrays, objects, shapes, has_plans=True)

    @override
    def _read_common(self) -> dict[str, Any]:
        common: dict[str, Any] = {}
        for part in _parts(self.folder):
            common |= TorchDistCheckpoint(
                self.folder / part, OpenOptions(index=self.folder_index.below(part))
            ).job.common()
        return common


def _below(part: str, array: StoredArray) -> StoredArray:
    chunks = tuple(
        chunk._replace(extent=chunk.extent._replace(file=f"{part}/{chunk.extent.file}")) for chunk in array.chunks
    )
    return replace(array, chunks=chunks)
