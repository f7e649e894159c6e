"""Torch's description of a checkpoint, answered from an index that is parsed already.

A rank whose tensors this package reads asks torch for some pickled objects alone. To unpickle the index for these takes
longer than all else that a rank of a very large job plans (benchmarks/planning.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from typing_extensions import override

from mcore_ckpt_ext.storage.dcp_index import DcpIndex

_KNOWN = {"state_dict_metadata", "storage_data"}


class LentMetadata(Metadata):
    """Says by itself which keys there are, and where objects lie; for anything else, the index is unpickled.

    `DefaultLoadPlanner` looks up what it is asked for in `state_dict_metadata`, `FileSystemReader` in `storage_data`
    (torch/distributed/checkpoint/default_planner.py and filesystem.py, 2.4 to 2.13).
    """

    def __init__(self, index: DcpIndex, unpickled: Callable[[], Metadata]) -> None:
        self.state_dict_metadata: Any = _Entries(index, unpickled)
        self.storage_data: Any = _Places(index, unpickled)
        self._unpickled = unpickled

    def __getattribute__(self, name: str) -> Any:
        """Of `planner_data` and the like, torch's class has defaults, which would hide what was stored."""
        if name in _KNOWN or name.startswith("__"):
            return super().__getattribute__(name)
        return getattr(super().__getattribute__("_unpickled")(), name)


class _Entries(Mapping[str, Any]):
    """What kind of thing stands under a key, `state_dict_metadata`."""

    def __init__(self, index: DcpIndex, unpickled: Callable[[], Metadata]) -> None:
        self._index, self._unpickled = index, unpickled

    @override
    def __getitem__(self, key: str) -> Any:
        if key in self._index.objects:
            return BytesStorageMetadata()
        return self._unpickled().state_dict_metadata[key]

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._index.objects or key in self._index.arrays

    @override
    def __iter__(self) -> Iterator[str]:
        yield from self._index.arrays
        yield from self._index.objects

    @override
    def __len__(self) -> int:
        return len(self._index.arrays) + len(self._index.objects)


class _Places(Mapping[MetadataIndex, Any]):
    """Where the bytes of a part lie, `storage_data`; that of an object has no offset."""

    def __init__(self, index: DcpIndex, unpickled: Callable[[], Metadata]) -> None:
        self._index, self._unpickled = index, unpickled

    @override
    def __getitem__(self, part: MetadataIndex) -> Any:
        place = self._index.objects.get(part.fqn) if part.offset is None else None
        return self._unpickled().storage_data[part] if place is None else _StorageInfo(*place)

    @override
    def __iter__(self) -> Iterator[MetadataIndex]:
        return iter(self._unpickled().storage_data)

    @override
    def __len__(self) -> int:
        return len(self._unpickled().storage_data)
