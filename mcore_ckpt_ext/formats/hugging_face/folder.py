"""A folder as transformers lays it out: files of weights, where each tensor lies, and the small files beside them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.planning.array_location import PlainExtent, Scaled
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.dcp_index import extent_of
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.index_entries import StoredObject
from mcore_ckpt_ext.storage.json_text import parsed
from mcore_ckpt_ext.storage.paths import as_path, is_remote
from mcore_ckpt_ext.storage.safetensors import WRITER, check_index, read_header, read_json, writer_of
from mcore_ckpt_ext.storage.tensor_reference import TensorReference
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FOLDER = "tokenizer"
"""Of an iteration folder, as Megatron itself keeps it (`save_tokenizer_assets`, checkpointing.py, commit 6c344290)."""

# Weights in one file, or an index of the files, in the order in which transformers looks for them
# (`_get_resolved_checkpoint_files`, modeling_utils.py, 4.36 to 5.23).
_SINGLE = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_IN_ORDER = (_SINGLE[0], INDICES[0], _SINGLE[1], INDICES[1])
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# How `torch.save` began its files before 1.6 (`MAGIC_NUMBER`, torch/serialization.py).
_BEFORE_ZIP = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
ADAPTER = "adapter_config.json"
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "tokenizer.model.v3", "tokenizer.model.v7", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "chat_template.jinja", "chat_template.json",
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
COMPANIONS = (CONFIG, GENERATION_CONFIG, *_TOKENIZER)
"""The small files that belong to a model, by name."""
# A tokenizer's own code, which nothing here runs, and its further templates.
_FURTHER = ("tokenization_*.py", "*.tiktoken", "additional_chat_templates/*.jinja")
_FURTHER_PATTERN = r"tokenization_\w+\.py|[\w.-]+\.tiktoken|additional_chat_templates/[\w.-]+\.jinja"
COMPANION_PATTERN = "|".join([*map(re.escape, COMPANIONS), _FURTHER_PATTERN])
"""The names of the small files that a folder may have, as a regular expression."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the folder: its shape in elements, the array that holds it, and the first of its elements there.

    `turned`: the array holds the matrices of the last two axes transposed.
    """

    shape: tuple[int, ...]
    extent: PlainExtent | Scaled
    first: int = 0
    turned: bool = False


def is_huggingface(folder: Path) -> bool:
    """Whether a folder looks like one that transformers or PEFT wrote."""
    # Canonical folders have an index of the same name, and Megatron's may hold anything beside their own files.
    if any((folder / name).exists() for name in ("common.json", "metadata.json")):
        return False
    return any((folder / name).exists() for name in (CONFIG, ADAPTER, *_SINGLE, *INDICES))


def is_peft(folder: Path) -> bool:
    """Whether a folder is one that peft wrote: adapters without their model."""
    return (folder / ADAPTER).is_file() and not (folder / CONFIG).exists()


def is_model(folder: Path) -> bool:
    """Whether a folder holds a configuration and weights; of either alone, other programs leave files, too."""
    has_weights = any((folder / name).is_file() for name in _IN_ORDER)
    return has_weights and (folder / CONFIG).is_file() and is_huggingface(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model that can be converted.

    Raises:
        UnreadableCheckpointError: it is missing or damaged.
        UnsupportedCheckpointError: the folder holds an adapter.
    """
    if (folder / ADAPTER).exists():
        raise adapters_without_model(folder)
    if not (folder / CONFIG).exists():
        raise UnreadableCheckpointError(
            "the folder has weights of a Hugging Face model, but nothing that says of which",
            expected=CONFIG, where=str(folder), helps=f"put the model's {CONFIG} beside them",
        )  # fmt: skip
    return read_json(folder / CONFIG)


def adapters_without_model(folder: Path) -> UnsupportedCheckpointError:
    """The refusal of a folder of adapters, where nothing says for which model they are."""
    return UnsupportedCheckpointError(
        "this folder holds an adapter (LoRA), not a model", found=ADAPTER, where=str(folder),
        helps="name the model that it is for: --weights FOLDER; or merge the two: convert --merge FOLDER",
    )  # fmt: skip


def read_tensors(reader: FolderReader, below: str = "") -> tuple[dict[str, StoredTensor], list[str]]:
    """All tensors of the folder, and its other files of weights, which are not looked at.

    Args:
        reader: of the checkpoint's folder.
        below: the folder in it that the weights lie in.

    Raises:
        UnreadableCheckpointError: a file is missing or damaged, or the index names what is not there.
    """
    folder = reader.folder / below
    found = [name for name in _IN_ORDER if (folder / name).exists()]
    if not found:
        raise UnreadableCheckpointError(
            "the folder holds no weights", expected=" or ".join((*_SINGLE, *INDICES)), where=str(folder)
        )
    first, *others = found
    if first in INDICES:
        tensors = _tensors_of_index(reader, below, folder / first)
    else:
        tensors = dict(tensors_of(reader, _joined(below, first)))
    read = {Path(tensor.extent.file).name for tensor in tensors.values()} | {first}
    strays = {path.name for pattern in _WEIGHTS for path in folder.glob(pattern)} - read
    return tensors, sorted(strays | set(others))


def _tensors_of_index(reader: FolderReader, below: str, path: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UnreadableCheckpointError("the index has no weight_map", where=str(path))
    files = sorted(set(weight_map.values()))
    strange = [file for file in files if Path(file).name != file]
    absent = [file for file in files if file not in strange and not (path.parent / file).exists()]
    if strange or absent:
        raise UnreadableCheckpointError(
            "the index names files that are not there", found=", ".join((strange + absent)[:4]), where=str(path),
            helps="the download or copy is incomplete: fetch the missing files",
        )  # fmt: skip
    found: dict[str, StoredTensor] = {}
    origin: dict[str, str] = {}
    for file in files:
        for name, tensor in tensors_of(reader, _joined(below, file)):
            if name in found:
                raise UnreadableCheckpointError(
                    "two files of the index hold a tensor of one name", found=f"{name} in {origin[name]} and {file}",
                    where=str(path), helps="files of different models or uploads are mixed: fetch them anew",
                )  # fmt: skip
            found[name] = tensor
            origin[name] = file
    check_index(weight_map, origin, path, "files of different models or uploads are mixed: fetch them anew")
    return found


def tensors_of(reader: FolderReader, file: str) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of one file, safetensors or a pickle, by name.

    Raises:
        UnreadableCheckpointError: it is damaged, or holds something else.
        UnsupportedCheckpointError: it is older than torch 1.6.
    """
    if file.endswith(".safetensors"):
        for name, shape, extent in read_header(reader, file):
            yield name, StoredTensor(shape, extent)
        return
    if reader.read(file, 0, min(reader.size(file), len(_BEFORE_ZIP))) == _BEFORE_ZIP:
        raise UnsupportedCheckpointError(
            "a file of weights is of the kind that torch wrote before 1.6", found="a pickle and not an archive",
            where=str(reader.folder / file),
            helps="load it with torch and save it anew: torch.save(torch.load(PATH, weights_only=True), PATH)",
        )  # fmt: skip
    content = TorchArchive(reader, file).load()
    if not isinstance(content, dict):
        raise UnreadableCheckpointError("a file of weights holds no state dict", where=str(reader.folder / file))
    for name, value in content.items():
        if not isinstance(value, TensorReference) or not value.is_contiguous:
            raise UnreadableCheckpointError(
                "a file of weights holds something that is not a plain tensor", found=f"{type(value).__name__} {name}",
                where=str(reader.folder / file),
            )  # fmt: skip
        yield str(name), StoredTensor(value.shape, extent_of(value, _whole_file(reader, file)), value.offset)


def written_by_us(folder: Path) -> bool:
    """Whether every file of weights in a folder says that this package wrote it."""
    reader = FolderReader(folder)
    plain = [writer_of(reader, path.name) for path in folder.glob("*.safetensors")]
    pickled = [TorchArchive(reader, path.name).writer() for path in folder.glob("*.bin")]
    return {*plain, *pickled} == {WRITER}


def _whole_file(reader: FolderReader, file: str) -> StoredObject:
    return StoredObject(file, 0, reader.size(file))


def companions(folder: Path, below: str = "") -> dict[str, bytes]:
    """The small files that belong to a model: its tokenizer, and the two configurations.

    Args:
        folder: of a checkpoint, of a model, or of a tokenizer alone; nothing where there is no such folder.
        below: the folder in it that they lie in.
    """
    found: dict[str, bytes] = {}
    for name in _companion_names(folder, below):
        with contextlib.suppress(OSError):
            found[name] = read_file(folder, _joined(below, name))
    return found


def _companion_names(folder: Path, below: str) -> list[str]:
    """The small files to look for: the known ones, and those that a folder of this machine has by a pattern."""
    if is_remote(folder):
        return list(COMPANIONS)
    there = folder / below
    further = (path.relative_to(there).as_posix() for pattern in _FURTHER for path in there.glob(pattern))
    return [*COMPANIONS, *sorted(name for name in further if re.fullmatch(COMPANION_PATTERN, name))]


def _joined(below: str, name: str) -> str:
    return f"{below}/{name}" if below else name


def refused_companions(folder: Path, below: str = "") -> dict[str, str]:
    """Those that are there but are not copied, with the reason."""
    found: dict[str, str] = {}
    for name in _companion_names(folder, below):
        if not is_remote(folder) and not os.path.lexists(folder / below / name):
            continue
        if reason := _why_unreadable(folder, _joined(below, name)):
            found[name] = reason
    return found


def tokenizer_files(path: str | os.PathLike[str] | None) -> dict[str, bytes]:
    """The small files in the folder of a tokenizer that the user names; none without a name.

    Raises:
        UnreadableCheckpointError: it has none.
    """
    if path is None:
        return {}
    found = companions(as_path(path))
    if not found:
        refused = "; ".join(f"{name}: {why}" for name, why in refused_companions(as_path(path)).items())
        there = is_remote(as_path(path)) or as_path(path).is_dir()
        raise UnreadableCheckpointError(
            "the folder holds no tokenizer" if there else "there is no such folder", found=refused or None,
            expected="the small files of a tokenizer or model, such as tokenizer.json or config.json", where=str(path),
            helps="name the folder of a tokenizer or model on this machine: --tokenizer PATH",
        )  # fmt: skip
    return found


def _why_unreadable(folder: Path, name: str) -> str | None:
    try:
        read_file(folder, name)
    except FileNotFoundError:
        return None if is_remote(folder) else "a link to nowhere"  # what a remote store lacks is not there
    except OSError as error:
        return error.strerror or str(error)
    return None


def json_of(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A JSON object among small files; empty where none can be read."""
    try:
        content = parsed(files.get(name, b"{}"))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def tokens_of(files: Mapping[str, bytes]) -> int | None:
    """The size of the vocabulary according to a model's or tokenizer's own files; None where they do not say.

    `config.json` says how many rows the embedding has, which may be more than the tokenizer has tokens.
    """
    if type(size := json_of(files, CONFIG).get("vocab_size")) is int:
        return size
    tokenizer = json_of(files, "tokenizer.json")
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, (dict, list)):
        numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
        return _after_the_last([*numbers, *(token.get("id") for token in tokens)])
    words = json_of(files, "vocab.json")
    return _after_the_last(words.values()) if words else None


def _after_the_last(numbers: Collection[object]) -> int:
    return 1 + max((number for number in numbers if type(number) is int), default=-1)
