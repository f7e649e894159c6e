"""Base of `fsdp_dtensor` and `torch_dcp`: torch.distributed.checkpoint with flattened keys.

Every entry of a nested dict is a separate object or array, whose key is the path to it. The readers convert the index
to that of a `torch_dist` checkpoint.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from typing_extensions import override

from mcore_ckpt_ext.formats.parts import StoredWeights, lazy
from mcore_ckpt_ext.formats.plain_dcp import plain_backend
from mcore_ckpt_ext.formats.stacking import sharded_keys
from mcore_ckpt_ext.formats.stored_parts import StoredParts
from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint
from mcore_ckpt_ext.formats.unread_state import (
    COMMON_KEYS,
    OTHER,
    RERUN_STATE,
    UNKNOWN,
    UnreadState,
    merge_entries,
    unread_job_state,
)
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex

MODEL = "model."
RANDOM_STATE = "rng_state."


class FlattenedCheckpoint(TorchDistCheckpoint):
    """One iteration folder of torch's distributed checkpoint, written by Megatron with flattened keys."""

    @classmethod
    @override
    def recognizes(cls, stored: FolderIndex) -> bool:
        return super().recognizes(stored) or plain_backend(stored) == cls.name

    @cached_property
    @override
    def model(self) -> StoredWeights:
        # Megatron's keys, because these formats do not stack layers.
        keys = lazy(lambda: sharded_keys(self.model.weights().names(), self.job.arguments()))
        return replace(super().model, sharded_keys=keys)

    @override
    def _stored_parts(self) -> Iterator[StoredParts]:
        for key, array in self._stored_index.arrays.items():
            if array.chunks:
                yield StoredParts(self.kind_of(key), key, array.files_and_bytes())
        for key, stored in self._stored_index.objects.items():
            yield StoredParts(OTHER, key, [(stored.file, stored.length)])

    @cached_property
    @override
    def _stored_index(self) -> DcpIndex:
        return self.folder_index.content

    @override
    def _read_common(self) -> dict[str, Any]:
        common: dict[str, Any] = {}
        for key in self._stored_index.objects:
            first, *rest = key.split(".")
            if first in COMMON_KEYS and len(rest) <= 1:
                value = self._stored_object(key)
                if rest:
                    common.setdefault(first, {})[rest[0]] = value
                else:
                    common[first] = value
        return common

    def _stored_object(self, key: str) -> Any:
        return self._load_archived(self._stored_index.objects[key], key)

    @override
    def _unwrap(self, loaded: Any, where: str) -> Any:
        return loaded

    @cached_property
    @override
    def _keeps_nothing(self) -> bool:
        return False

    @override
    def _unread(self, *, objects: bool = True) -> list[UnreadState]:
        return merge_entries(self._left_over())

    def _left_over(self) -> Iterator[UnreadState]:
        index = self._stored_index
        sizes = {key: place.length for key, place in index.objects.items()}
        sizes |= {key: array.nbytes for key, array in index.arrays.items()}
        for key, nbytes in sizes.items():
            if key.split(".")[0] in COMMON_KEYS or self._is_taken(key):
                continue
            if key.startswith((RANDOM_STATE, RERUN_STATE)):
                yield unread_job_state(key.partition(".")[0], nbytes)
            else:
                yield UnreadState(key, UNKNOWN if key.startswith("optimizer.") else OTHER, nbytes)

    @abstractmethod
    def _is_taken(self, key: str) -> bool:
        """Return whether a stored key is read, or carries no information."""

    @abstractmethod
    def kind_of(self, key: str) -> str:
        """Return the kind of a stored array."""
