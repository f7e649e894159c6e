"""The files of folders that ColossalAI's Booster saves: weights, and the index of optimizer states."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.formats.hugging_face.folder import INDICES, StoredTensor, is_huggingface, stored_tensor_of
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.json_text import read_json
from mcore_ckpt_ext.storage.listed_files import check_listed
from mcore_ckpt_ext.storage.safetensors import list_arrays
from mcore_ckpt_ext.storage.tensor_reference import TensorReference
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

_OPTIMIZER_INDICES = ("pytorch_optim.bin.index.json", "optimizer.safetensors.index.json")
# transformers counts its shards, "-00001-of-00002"; ColossalAI only numbers them, by stage with pipelines.
_SHARD = re.compile(r"^(?:pytorch_model|model)(?:-stage-\d{5}-shard)?-\d{5}\.(?:bin|safetensors)$")


class OptimizerIndex(NamedTuple):
    """The content of an index of the optimizer's states; files are relative to the checkpoint's folder.

    Args:
        group_file: the file of the parameter groups.
        files: the files of states, and the numbers of the parameters in each.
    """

    group_file: str
    files: dict[str, set[str]]


def weights_below(folder: Path) -> str | None:
    """Return the subfolder with the weights, empty for the folder itself; None if not ColossalAI's."""
    if is_huggingface(folder):
        return "" if _optimizer_index(folder) or _has_its_shards(folder) else None
    below = sorted(path for path in _folders(folder) if is_huggingface(path))
    if len(below) != 1 or not any(_optimizer_index(path) for path in (folder, *_folders(folder))):
        return None
    return below[0].name


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
    numbers = content.get("weight_map")
    groups = content.get("metadata", {}).get("param_groups")
    if not isinstance(numbers, Mapping) or not isinstance(groups, str):
        raise UnreadableCheckpointError("the optimizer's index has no weight_map or no groups", where=str(index))
    files: dict[str, set[str]] = {}
    for number, file in numbers.items():
        files.setdefault(str(file), set()).add(str(number))
    check_listed(index, (*files, groups), "the save or the copy is incomplete: use another checkpoint")
    below = PurePosixPath(index.parent.relative_to(folder))
    return OptimizerIndex(str(below / groups), {str(below / file): keys for file, keys in files.items()})


def states_of(reader: FolderReader, file: str) -> Iterator[tuple[str, str, StoredTensor | None]]:
    """Yield the states of one file: number of the parameter, kind, and tensor (None for a number).

    Raises:
        UnreadableCheckpointError: the file is damaged, or contains anything but states.
    """
    if file.endswith(".safetensors"):
        # Asynchronous saves name them "state.<number>.<kind>" (0.5.0, utils/safetensors.py: _flatten_optim_state_dict).
        for key, shape, extent in list_arrays(reader, file):
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
