"""A folder in transformers' layout: files of weights, locations of tensors, and small files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import ContentError, UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.auxiliary_files import CONFIG as CONFIG
from mcore_ckpt_ext.planning.array_location import PlainExtent, QuantizedMatrix
from mcore_ckpt_ext.storage.dcp_index import extent_of
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.index_entries import StoredObject
from mcore_ckpt_ext.storage.json_text import read_json
from mcore_ckpt_ext.storage.listed_files import check_listed
from mcore_ckpt_ext.storage.safetensors import WRITER, check_index, list_arrays, writer_of
from mcore_ckpt_ext.storage.tensor_reference import TensorReference
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

# Weights in one file, or an index of the files, in the order in which transformers looks them up
# (`_get_resolved_checkpoint_files`, modeling_utils.py, 4.36 to 5.23).
_SINGLE = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHT_FILES = (_SINGLE[0], INDICES[0], _SINGLE[1], INDICES[1])
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# The first bytes of files of `torch.save` before 1.6 (`MAGIC_NUMBER`, torch/serialization.py).
_BEFORE_ZIP = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the folder: its shape in elements, its array, and its first element there.

    `is_transposed`: the array contains the matrices of the last two axes transposed.
    """

    shape: tuple[int, ...]
    extent: PlainExtent | QuantizedMatrix
    first: int = 0
    is_transposed: bool = False


def is_huggingface(folder: Path) -> bool:
    """Return whether a folder was written by transformers or PEFT, judging by its files."""
    # Canonical folders have an index of the same name, and Megatron's folders may contain additional files.
    if any((folder / name).exists() for name in ("common.json", "metadata.json")):
        return False
    return any((folder / name).exists() for name in (CONFIG, ADAPTER, *_SINGLE, *INDICES))


def is_peft(folder: Path) -> bool:
    """Return whether a folder was written by peft: adapters without their model.

    The model's `config.json` may be among them. transformers loads a folder with both as one model
    (`_BaseAutoModelClass.from_pretrained`, auto_factory.py, 5.23).
    """
    has_weights = any((folder / name).exists() for name in WEIGHT_FILES)
    return (folder / ADAPTER).is_file() and not (has_weights and (folder / CONFIG).exists())


def is_model(folder: Path) -> bool:
    """Return whether a folder has a configuration and weights; one alone may come from another program."""
    has_weights = any((folder / name).is_file() for name in WEIGHT_FILES)
    return has_weights and (folder / CONFIG).is_file() and is_huggingface(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a model that can be converted.

    Raises:
        UnreadableCheckpointError: it is missing or damaged.
        UnsupportedCheckpointError: the folder contains an adapter.
    """
    if is_peft(folder):
        raise adapters_without_model(folder)
    if (folder / ADAPTER).exists():
        raise UnsupportedCheckpointError(
            "this folder holds a model and an adapter (LoRA) for it, which transformers loads together",
            found=f"{CONFIG} and {ADAPTER}",
            where=str(folder),
            hint="move adapter_config.json and adapter_model.safetensors to a folder of their own; to merge the two, "
            "convert that with --merge MODEL --to hf",
        )
    if not (folder / CONFIG).exists():
        raise UnreadableCheckpointError(
            "the folder has weights of a Hugging Face model, but no configuration",
            expected=CONFIG,
            where=str(folder),
            hint=f"add the model's {CONFIG} to the folder",
        )
    return read_json(folder / CONFIG)


def adapters_without_model(folder: Path) -> UnsupportedCheckpointError:
    """Return the error for a folder of adapters whose model is unknown."""
    return UnsupportedCheckpointError(
        "this folder holds an adapter (LoRA), not a model",
        found=ADAPTER,
        where=str(folder),
        hint="name the folder of the model that it was trained for, or pass it besides: --weights FOLDER; or merge the "
        "two: convert with --merge FOLDER",
    )


def read_tensors(reader: FolderReader, below: str = "") -> tuple[dict[str, StoredTensor], list[str]]:
    """Return all tensors of the folder, and the names of unused files of weights.

    Args:
        reader: reads the checkpoint's folder.
        below: the subfolder with the weights.

    Raises:
        UnreadableCheckpointError: a file is missing or damaged, or lacks a tensor that the index lists.
    """
    folder = reader.folder / below
    names = [name for name in WEIGHT_FILES if (folder / name).exists()]
    if not names:
        raise UnreadableCheckpointError(
            "the folder contains no weights", expected=" or ".join((*_SINGLE, *INDICES)), where=str(folder)
        )
    first, *others = names
    if first in INDICES:
        tensors = _tensors_of_index(reader, below, folder / first)
    else:
        tensors = dict(tensors_of(reader, _join(below, first)))
    read = {Path(tensor.extent.file).name for tensor in tensors.values()} | {first}
    return tensors, sorted((weight_files_of(folder) - read) | set(others))


def weight_files_of(folder: Path) -> set[str]:
    """Return the names of all files of weights in a folder, listed in an index or not."""
    return {path.name for pattern in _WEIGHTS for path in folder.glob(pattern)}


def stored_names(folder: Path) -> list[str]:
    """Return the names of a folder's tensors, for a message; empty if its weights cannot be read."""
    try:
        return [*read_tensors(FolderReader(folder))[0]]
    except ContentError:
        return []


def _tensors_of_index(reader: FolderReader, below: str, path: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UnreadableCheckpointError("the index has no weight_map", where=str(path))
    files = sorted(set(weight_map.values()))
    check_listed(path, files, "the download or copy is incomplete: download the missing files")
    tensors: dict[str, StoredTensor] = {}
    origin: dict[str, str] = {}
    for file in files:
        for name, tensor in tensors_of(reader, _join(below, file)):
            if name in tensors:
                raise UnreadableCheckpointError(
                    "two files of the index contain a tensor of the same name",
                    found=f"{name} in {origin[name]} and {file}",
                    where=str(path),
                    hint="files of different models or uploads are mixed: download them again",
                )
            tensors[name] = tensor
            origin[name] = file
    check_index(weight_map, origin, path, "files of different models or uploads are mixed: download them again")
    return tensors


def tensors_of(reader: FolderReader, file: str) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of one file, safetensors or a pickle, by name.

    Raises:
        UnreadableCheckpointError: the file is damaged, or contains anything but tensors.
        UnsupportedCheckpointError: it was written before torch 1.6.
    """
    if file.endswith(".safetensors"):
        for name, shape, extent in list_arrays(reader, file):
            yield name, StoredTensor(shape, extent)
        return
    if reader.read(file, 0, min(reader.size(file), len(_BEFORE_ZIP))) == _BEFORE_ZIP:
        raise UnsupportedCheckpointError(
            "a file of weights has the format of torch before 1.6",
            found="a pickle and not an archive",
            where=str(reader.folder / file),
            hint="load it with torch and save it again: torch.save(torch.load(PATH, weights_only=True), PATH)",
        )
    content = TorchArchive(reader, file).load()
    if not isinstance(content, dict):
        raise UnreadableCheckpointError("a file of weights is not a state dict", where=str(reader.folder / file))
    for name, value in content.items():
        if not isinstance(value, TensorReference) or not value.is_contiguous:
            raise UnreadableCheckpointError(
                "a file of weights contains something that is not a plain tensor",
                found=f"{type(value).__name__} {name}",
                where=str(reader.folder / file),
            )
        yield str(name), stored_tensor_of(reader, file, value)


def written_by_us(folder: Path) -> bool:
    """Return whether all files of weights in a folder are marked as written by this package."""
    reader = FolderReader(folder)
    plain = [writer_of(reader, path.name) for path in folder.glob("*.safetensors")]
    pickled = [TorchArchive(reader, path.name).writer() for path in folder.glob("*.bin")]
    return {*plain, *pickled} == {WRITER}


def stored_tensor_of(reader: FolderReader, file: str, tensor: TensorReference) -> StoredTensor:
    """Return the location of a contiguous tensor in a file that is one torch archive."""
    whole = StoredObject(file, 0, reader.size(file))
    return StoredTensor(tensor.shape, extent_of(tensor, whole), tensor.offset)


def _join(below: str, name: str) -> str:
    return f"{below}/{name}" if below else name
