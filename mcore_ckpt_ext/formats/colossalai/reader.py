"""Reads ColossalAI's sharded folders: weights in Hugging Face's layout, and an optimizer's shards.

``Booster.save_model(shard=True)`` writes a folder that transformers loads. ``save_optimizer(shard=True)`` writes the
states of the parameters by number, a file for the groups, and an index that names both (0.5.0,
checkpoint_io/utils.py: ``get_model_base_filenames``, ``get_optimizer_base_filenames``; the plugins' checkpoint_io).
Both are in one folder, or in two subfolders. The weights are read. The optimizer's states are listed with their sizes
but not read, because they belong to numbers and not to names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.families.family import Family
from mcore_ckpt_ext.formats.hugging_face.folder import INDICES, StoredTensor, is_huggingface, stored_tensor_of
from mcore_ckpt_ext.formats.hugging_face.model import TRANSFORMER_ENGINE
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.stored_parts import StoredPart
from mcore_ckpt_ext.formats.unread_state import UNKNOWN, UnreadState, joined
from mcore_ckpt_ext.layout.parameter_order import ParameterOrder
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.safetensors import read_header, read_json
from mcore_ckpt_ext.storage.tensor_reference import TensorReference
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

NAME = "colossalai"
_OPTIMIZER_INDICES = ("pytorch_optim.bin.index.json", "optimizer.safetensors.index.json")
# transformers counts its shards, "-00001-of-00002"; ColossalAI only numbers them, by stage with pipelines.
_SHARD = re.compile(r"^(?:pytorch_model|model)(?:-stage-\d{5}-shard)?-\d{5}\.(?:bin|safetensors)$")
_WHY = "state of ColossalAI's optimizer, by the numbers of its parameters"
_SHOWN = 4


class OptimizerIndex(NamedTuple):
    """The content of an index of the optimizer's states; files are relative to the checkpoint's folder.

    Args:
        group_file: the file of the parameter groups.
        files: the files of states, and the numbers of the parameters in each.
    """

    group_file: str
    files: dict[str, set[str]]


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


def is_colossalai(folder: Path) -> bool:
    """Return whether a folder is ColossalAI's: with sharded weights and possibly an optimizer's shards."""
    return weights_below(folder) is not None


def weights_below(folder: Path) -> str | None:
    """Return the subfolder with the weights, empty for the folder itself; None if not ColossalAI's."""
    if is_huggingface(folder):
        return "" if _optimizer_index(folder) or _has_its_shards(folder) else None
    below = sorted(path for path in _folders(folder) if is_huggingface(path))
    if len(below) != 1 or not any(_optimizer_index(path) for path in (folder, *_folders(folder))):
        return None
    return below[0].name


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _optimizer_index(folder: Path) -> Path | None:
    return next((folder / name for name in _OPTIMIZER_INDICES if (folder / name).exists()), None)


def _has_its_shards(folder: Path) -> bool:
    for name in INDICES:
        if (folder / name).exists():
            files = read_json(folder / name).get("weight_map")
            return isinstance(files, Mapping) and bool(files) and all(_SHARD.match(str(f)) for f in files.values())
    return False


class ColossalAICheckpoint(HuggingFaceCheckpoint):
    """A folder that ColossalAI's Booster saved."""

    format = NAME
    foreign_writer = "no Megatron: ColossalAI's Booster wrote it"

    def __init__(
        self,
        folder: Path,
        order_sources: Sequence[ParameterOrder] = (),
        *,
        family: Family | None = None,
        transformer_impl: str = TRANSFORMER_ENGINE,
    ) -> None:
        """Read the configuration, the indexes and the files' headers.

        Args:
            folder: the folder, with the weights and the optimizer (if any) in it or in one subfolder each.
            order_sources: see `FormatReader`.
            family: see `HuggingFaceCheckpoint`.
            transformer_impl: see `HuggingFaceCheckpoint`.

        Raises:
            UnreadableCheckpointError: a file is missing or damaged, or the index and the files disagree.
            UnsupportedCheckpointError: the kind of model is not supported.
        """
        super().__init__(
            folder, order_sources, family=family, transformer_impl=transformer_impl, below=weights_below(folder) or ""
        )
        self._indices = [optimizer_index_of(folder, path) for path in optimizer_indices(folder)]
        self._optimizer_files = {file: keys for index in self._indices for file, keys in index.files.items()}

    @property
    @override
    def starts_jobs(self) -> str:
        return ""

    @property
    @override
    def conversion(self) -> str:
        return f"{super().conversion}{' --drop optimizer' if self._indices else ''}"

    @override
    def stored_parts(self) -> Iterator[StoredPart]:
        yield from super().stored_parts()
        for shard in self.optimizer_shards:
            yield StoredPart(shard.file, shard.kind, f"{shard.kind} of parameter {shard.parameter}", shard.nbytes)

    @property
    def _group_files(self) -> list[str]:
        return [index.group_file for index in self._indices]

    @cached_property
    def optimizer_shards(self) -> list[OptimizerShard]:
        """All states of all parameters, from metadata.

        Raises:
            UnreadableCheckpointError: a file is damaged, or lacks a parameter that the index lists.
        """
        found: list[OptimizerShard] = []
        for file, expected in self._optimizer_files.items():
            shards = [shard for shard in _shards(self.reader, file) if shard.parameter in expected]
            if missing := sorted(expected - {shard.parameter for shard in shards}):
                raise UnreadableCheckpointError(
                    "a file has other states than its index lists: it belongs to another save",
                    found=", ".join(f"no parameter {number}" for number in missing[:_SHOWN]),
                    expected=f"states of {len(expected)} parameters",
                    where=str(self.folder / file),
                )
            found += shards
        return found

    @override
    def unread(self, *, objects: bool = True) -> list[UnreadState]:
        """Return the optimizer's states, each by its number and kind."""
        shards = self.optimizer_shards
        states = [UnreadState(f"{one.kind} of parameter {one.parameter}", one.kind, one.nbytes, _WHY) for one in shards]
        groups = [UnreadState(file, UNKNOWN, self.reader.size(file), _WHY) for file in self._group_files if shards]
        return [*super().unread(objects=objects), *joined([*states, *groups])]

    @override
    def archives(self) -> Iterator[tuple[str, int, int]]:
        """Yield the torch archives among its files; safetensors have no checksums."""
        weights = [file for file, _, _ in super().archives()]
        files = [file for file in (*weights, *self._optimizer_files, *self._group_files) if file.endswith(".bin")]
        return ((file, 0, self.reader.size(file)) for file in files)


def optimizer_indices(folder: Path) -> list[Path]:
    """Return the indexes of optimizer states in a checkpoint's folder and its subfolders."""
    places = [folder, *sorted(_folders(folder))]
    return [index for index in map(_optimizer_index, places) if index is not None]


def optimizer_index_of(folder: Path, index: Path) -> OptimizerIndex:
    """Read an index of the optimizer's states.

    Args:
        folder: the checkpoint's folder.
        index: the index.

    Raises:
        UnreadableCheckpointError: it is damaged, or lists files that do not exist.
    """
    content = read_json(index)
    numbers, groups = content.get("weight_map"), content.get("metadata", {}).get("param_groups")
    if not isinstance(numbers, Mapping) or not isinstance(groups, str):
        raise UnreadableCheckpointError("the optimizer's index has no weight_map or no groups", where=str(index))
    files: dict[str, set[str]] = {}
    for number, file in numbers.items():
        files.setdefault(str(file), set()).add(str(number))
    outside = [file for file in (*files, groups) if Path(file).name != file]
    absent = [file for file in (*files, groups) if file not in outside and not (index.parent / file).exists()]
    if outside or absent:
        raise UnreadableCheckpointError(
            "the optimizer's index lists files that do not exist",
            found=", ".join((outside + absent)[:_SHOWN]),
            where=str(index),
            hint="the save or the copy is incomplete: use another checkpoint",
        )
    below = index.parent.relative_to(folder)
    return OptimizerIndex(str(below / groups), {str(below / file): keys for file, keys in files.items()})


def states_of(reader: FolderReader, file: str) -> Iterator[tuple[str, str, StoredTensor | None]]:
    """Yield the states of one file: number of the parameter, kind, and tensor (None for a number).

    Raises:
        UnreadableCheckpointError: the file is damaged, or contains anything but states.
    """
    if file.endswith(".safetensors"):
        # Asynchronous saves name them "state.<number>.<kind>" (0.5.0, utils/safetensors.py: _flatten_optim_state_dict).
        for key, shape, extent in read_header(reader, file):
            _, number, kind = (*key.split(".", 2), "", "")[:3]
            yield number, kind, StoredTensor(shape, extent)
        return
    content = TorchArchive(reader, file).load()
    if not isinstance(content, Mapping) or not all(isinstance(state, Mapping) for state in content.values()):
        raise UnreadableCheckpointError("a file contains no optimizer states", where=str(reader.folder / file))
    for number, state in content.items():
        for kind, value in state.items():
            is_tensor = isinstance(value, TensorReference) and value.is_contiguous
            yield str(number), str(kind), stored_tensor_of(reader, file, value) if is_tensor else None


def _shards(reader: FolderReader, file: str) -> Iterator[OptimizerShard]:
    for number, kind, tensor in states_of(reader, file):
        nbytes = 0 if tensor is None else prod(tensor.shape) * ITEM_SIZE[tensor.extent.dtype]
        yield OptimizerShard(file, number, kind, nbytes)
