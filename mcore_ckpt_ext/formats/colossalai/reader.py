"""Reads ColossalAI's sharded folders: weights in Hugging Face's layout, and an optimizer's shards.

``Booster.save_model(shard=True)`` writes a folder that transformers loads. ``save_optimizer(shard=True)`` writes the
states of the parameters by number, a file for the groups, and an index that names both (0.5.0,
checkpoint_io/utils.py: ``get_model_base_filenames``, ``get_optimizer_base_filenames``; the plugins' checkpoint_io).
Both are in one folder, or in two subfolders. The weights are read. The optimizer's states are listed with their sizes
but not read, because they belong to numbers and not to names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from mcore_ckpt_ext.errors import UnreadableCheckpointError, quantity
from mcore_ckpt_ext.formats.colossalai.folder import optimizer_index_of, optimizer_indices, states_of, weights_below
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.open_options import DEFAULT_OPTIONS, OpenOptions
from mcore_ckpt_ext.formats.parts import Files
from mcore_ckpt_ext.formats.stored_parts import StoredParts
from mcore_ckpt_ext.formats.unread_state import UNKNOWN, UnreadState, merge_entries
from mcore_ckpt_ext.formats.view import OpenedFormat
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.dcp_index import FolderIndex
from mcore_ckpt_ext.storage.files import FolderReader

NAME = "colossalai"
_WHY = "state of ColossalAI's optimizer, by the numbers of its parameters"
_SHOWN = 4


class OptimizerShard(NamedTuple):
    """One state of one parameter.

    Args:
        file: relative to the checkpoint's folder.
        parameter: its number in the optimizer's groups.
        kind: `exp_avg`, for example.
        nbytes: size in bytes; 0 for a number.
    """

    file: str
    parameter: str
    kind: str
    nbytes: int


class ColossalAICheckpoint(HuggingFaceCheckpoint):
    """A folder that ColossalAI's Booster saved."""

    name = NAME

    @classmethod
    @override
    def recognizes(cls, stored: FolderIndex) -> bool:
        return weights_below(stored.folder) is not None

    def __init__(self, folder: Path, options: OpenOptions = DEFAULT_OPTIONS) -> None:
        """Read the configuration, the indexes and the files' headers.

        Args:
            folder: the folder, with the weights and the optimizer (if any) in it or in one subfolder each.
            options: see `FormatReader`.

        Raises:
            UnreadableCheckpointError: a file is missing or damaged, or the index and the files disagree.
            UnsupportedCheckpointError: the kind of model is not supported.
        """
        super().__init__(folder, options, below=weights_below(folder) or "")
        self._indices = [optimizer_index_of(folder, path) for path in optimizer_indices(folder)]
        self._optimizer_files = {file: keys for index in self._indices for file, keys in index.files.items()}

    @cached_property
    @override
    def format(self) -> OpenedFormat:
        opened = super().format
        return replace(
            opened,
            foreign_writer="no Megatron: ColossalAI's Booster wrote it",
            starts_jobs=str,
            conversion=f"{opened.conversion}{' --drop optimizer' if self._indices else ''}",
        )

    @cached_property
    @override
    def files(self) -> Files:
        weights = super().files
        return replace(
            weights,
            archives=self._archives,
            stored_parts=lambda: chain(weights.stored_parts(), self._parts_of_optimizer()),
            unread=lambda *, objects=True: [*weights.unread(objects=objects), *self._unread_optimizer()],
        )

    def _parts_of_optimizer(self) -> Iterator[StoredParts]:
        for shard in self.optimizer_shards:
            name = f"{shard.kind} of parameter {shard.parameter}"
            yield StoredParts(shard.kind, name, [(shard.file, shard.nbytes)])

    @property
    def _group_files(self) -> list[str]:
        return [index.group_file for index in self._indices]

    @cached_property
    def optimizer_shards(self) -> list[OptimizerShard]:
        """All states of all parameters, from metadata.

        Raises:
            UnreadableCheckpointError: a file is damaged, or lacks a parameter that the index lists.
        """
        all_shards: list[OptimizerShard] = []
        for file, expected in self._optimizer_files.items():
            shards = [shard for shard in _shards(self.files.reader, file) if shard.parameter in expected]
            if missing := sorted(expected - {shard.parameter for shard in shards}):
                raise UnreadableCheckpointError(
                    "a file has other states than its index lists: it belongs to another save",
                    found=", ".join(f"no parameter {number}" for number in missing[:_SHOWN]),
                    expected=f"states of {quantity(len(expected), 'parameter')}",
                    where=str(self.folder / file),
                )
            all_shards += shards
        return all_shards

    def _unread_optimizer(self) -> list[UnreadState]:
        """Return the optimizer's states, each by its number and kind."""
        shards = self.optimizer_shards
        states = [
            UnreadState(f"{shard.kind} of parameter {shard.parameter}", shard.kind, shard.nbytes, _WHY)
            for shard in shards
        ]
        groups = [
            UnreadState(file, UNKNOWN, self.files.reader.size(file), _WHY) for file in self._group_files if shards
        ]
        return merge_entries([*states, *groups])

    @override
    def _archives(self) -> Iterator[tuple[str, int, int]]:
        """Yield the torch archives among its files; safetensors have no checksums."""
        weights = [file for file, _, _ in super()._archives()]
        files = [file for file in (*weights, *self._optimizer_files, *self._group_files) if file.endswith(".bin")]
        return ((file, 0, self.files.reader.size(file)) for file in files)


def _shards(reader: FolderReader, file: str) -> Iterator[OptimizerShard]:
    for number, kind, tensor in states_of(reader, file):
        nbytes = 0 if tensor is None else prod(tensor.shape) * ITEM_SIZE[tensor.extent.dtype]
        yield OptimizerShard(file, number, kind, nbytes)
