"""SHA-256 digests of the small files of a written folder, in a file of the same folder.

Tensors have checksums in their own files. Indexes, configurations and headers have none in any format that this package
writes, and a flipped bit may leave them well-formed, with another learning rate or another key.

mcore_ckpt_ext_digests.json
    sha256      digests of whole files, by relative path
    arrays      digests of the names, dtypes, shapes and offsets in safetensors headers (without `__metadata__`, whose
                checksums are only known when the tensors are)
    bytes       sizes of all files
    checksums   digests of the CRC-32s of the tensors in each file: they link the files of one conversion, so that a
                whole file of another one is found; zeros if they were not recorded
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from mcore_ckpt_ext.errors import UnreadableCheckpointError, quantity, unreadable_file
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.planning.write_plan import Output, OutputFile
from mcore_ckpt_ext.storage.checked_files import read_file
from mcore_ckpt_ext.storage.files import FolderReader, checked_name
from mcore_ckpt_ext.storage.json_text import json_file, parse_json
from mcore_ckpt_ext.storage.paths import file_sizes
from mcore_ckpt_ext.storage.remote import folder_reader
from mcore_ckpt_ext.storage.safetensors import SUFFIX, declared_arrays, planned_header, read_header
from mcore_ckpt_ext.storage.torch_archive import ByteRange, TorchArchive

FILE_NAME = "mcore_ckpt_ext_digests.json"
_MARK = "mcore_ckpt_ext digests"
_VERSION = 1
_KEYS = {"format", "version", "sha256", "arrays", "bytes", "checksums"}
_UNKNOWN = "0" * 64
# Files that only programs write; people also edit the others (config.json, tokenizers, run_config.yaml).
_OF_PROGRAMS = (".metadata", "metadata.json", "common.json")
_SUFFIXES_OF_PROGRAMS = (".index.json", ".pt", ".bin", ".distcp", SUFFIX)
_DATA_SUFFIXES = (".distcp", SUFFIX)
_SHOWN = 16


class ChangedFile(NamedTuple):
    """A file that has changed since it was written; `editable` if people edit files of this name."""

    name: str
    what: str
    editable: bool


@dataclass(frozen=True)
class DigestResult:
    """The result of comparing a folder with its digests.

    Attributes:
        compared: number of files that were compared.
        changed: the files that have changed since they were written.
        stale: the reason why the digests belong to another save and nothing was compared; otherwise empty.
        checksums: the digest of the checksums in each file; see `changed_checksums`.
    """

    compared: int
    changed: Sequence[ChangedFile] = ()
    stale: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)


def with_digests(output: Output, folder: str = "") -> Output:
    """Add a digest file to an output, for files below `folder` whose bytes are known before the tensors.

    `with_checksums` adds digests of the other files' checksums when their tensors are written.
    """
    filled = {record.file: bool(record.checksums or record.checksum_texts) for record in output.records}
    below = f"{folder}/" if folder else ""
    whole: dict[str, str] = {}
    arrays: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for file in output.files:
        if not file.name.startswith(below):
            continue
        name = file.name.removeprefix(below)
        sizes[name] = file.length
        if file.name not in filled:
            whole[name] = _sha256(_content(file))
        elif file.name.endswith(SUFFIX):
            arrays[name] = _sha256_of_arrays(planned_header(file))
    checksums = {file.removeprefix(below): _UNKNOWN for file, has_checksums in filled.items() if has_checksums}
    if not (whole or arrays or checksums):
        return output
    content = {
        "format": _MARK,
        "version": _VERSION,
        "sha256": whole,
        "arrays": arrays,
        "bytes": sizes,
        "checksums": checksums,
    }
    return Output([json_file(below + FILE_NAME, content), *output.files], output.records, output.notes)


def with_checksums(output: Output, digests: Mapping[str, str]) -> list[OutputFile]:
    """Return an output's digest file, if it has one, with digests of the checksums in each file."""
    files = []
    for file in output.files:
        if PurePosixPath(file.name).name == FILE_NAME:
            content = parse_json(file.literals[0][1])
            content["checksums"] = {name: digests.get(name, _UNKNOWN) for name in content["checksums"]}
            files.append(json_file(file.name, content))
    return files


def digests_of_checksums(
    reader: FolderReader, archives: Iterable[ByteRange], arrays: Iterable[RawArray]
) -> dict[str, str]:
    """Return a digest of the CRC-32s of the tensors in each file, whatever their order is.

    Args:
        reader: reads the folder.
        archives: torch archives of the folder.
        arrays: bare arrays of the folder, with their checksums if they have any.

    Raises:
        UnreadableCheckpointError: an archive cannot be read.
    """
    checksums: defaultdict[str, list[int]] = defaultdict(list)
    for file, offset, length in archives:
        storages = TorchArchive(reader, file, offset, length).storage_checksums or ()
        checksums[file].extend(crc for _, crc in storages)
    for array in arrays:
        if array.crc is not None:
            checksums[array.file].append(array.crc)
    return {file: _sha256(struct.pack(f"<{len(crcs)}I", *sorted(crcs))) for file, crcs in checksums.items()}


def recorded_checksums(folder: Path) -> Mapping[str, str]:
    """Return the digests of the checksums in each file of a folder; empty without digests of this save.

    Raises:
        UnreadableCheckpointError: the digests are damaged.
    """
    stored = _read(folder)
    return {} if stored is None or _why_stale(folder, stored) else stored["checksums"]


def changed_checksums(
    recorded: Mapping[str, str], reader: FolderReader, archives: Iterable[ByteRange], arrays: Iterable[RawArray]
) -> list[ChangedFile]:
    """Return the files whose tensors are not those that were written with the other files.

    Args:
        recorded: the digests of the checksums in each file; nothing is read of files without one.
        reader: reads the folder, like the rest as in `digests_of_checksums`.
        archives: torch archives of the folder.
        arrays: bare arrays of the folder.

    Raises:
        UnreadableCheckpointError: an archive cannot be read.
    """
    expected = {name: digest for name, digest in recorded.items() if digest != _UNKNOWN}
    if not expected:
        return []
    digests = digests_of_checksums(
        reader,
        (archive for archive in archives if archive[0] in expected),
        (array for array in arrays if array.file in expected),
    )
    difference = (
        f"its tensors are not those that were written with the other files; if that is meant, remove {FILE_NAME}"
    )
    return [
        ChangedFile(name, difference, editable=False)
        for name, digest in expected.items()
        if digests.get(name) != digest
    ]


def compare_digests(folder: Path) -> DigestResult | None:
    """Compare the files of a folder with its digests.

    Returns:
        None if the folder has no digests.

    Raises:
        UnreadableCheckpointError: the digests are damaged, or a file that they name cannot be read.
    """
    stored = _read(folder)
    if stored is None:
        return None
    if stale := _why_stale(folder, stored):
        return DigestResult(0, (), stale)
    reader = folder_reader(folder)
    changed = [*_changed_files(folder, stored["sha256"], lambda name: _sha256(read_file(folder, name)))]
    changed += _changed_files(folder, stored["arrays"], lambda name: _sha256_of_arrays(read_header(reader, name)))
    return DigestResult(len(stored["sha256"]) + len(stored["arrays"]), tuple(changed), checksums=stored["checksums"])


def check_digests(folder: Path) -> None:
    """Refuse a folder in which a file that only programs write has changed.

    Raises:
        UnreadableCheckpointError: such a file has changed, or the digests cannot be read.
    """
    comparison = compare_digests(folder)
    for file in comparison.changed if comparison else ():
        if not file.editable:
            raise UnreadableCheckpointError(
                "a file of the checkpoint has changed since it was written",
                found=file.what,
                where=str(folder / file.name),
                hint="use another copy, or convert the source again; if the file was edited on purpose, remove "
                f"{FILE_NAME}",
            )


def _why_stale(folder: Path, stored: Mapping[str, Any]) -> str:
    """Return why digests belong to another save; empty if they do not.

    A job that overwrites a converted folder leaves its digests. Another save is recognized by the sizes and names of
    its data files. A truncated file has another size, too; the index shows it.
    """
    sizes = stored["bytes"]
    data = sorted({*stored["arrays"], *stored["checksums"]} & sizes.keys())
    present = file_sizes(folder, skip_forbidden=True) if data else {}  # one request to a store, for all files
    for name in data:
        checked_name(name, folder)
        if present.get(name, sizes[name]) != sizes[name]:
            return f"{name} has {quantity(present[name], 'byte')}, and had {sizes[name]:,}"
    others = [name for name in present if "/" not in name and name.endswith(_DATA_SUFFIXES) and name not in sizes]
    return f"{min(others)} is not one of its files" if others else ""


def _changed_files(folder: Path, stored: Mapping[str, str], digest: Callable[[str], str]) -> Iterator[ChangedFile]:
    for name, expected in stored.items():
        checked_name(name, folder)
        try:
            actual = digest(name)
        except OSError as error:
            yield ChangedFile(name, f"it cannot be read: {error.strerror}", editable=_is_editable(name))
            continue
        if actual != expected:
            difference = f"its SHA-256 is {actual[:_SHOWN]}..., recorded is {expected[:_SHOWN]}..."
            yield ChangedFile(name, difference, editable=_is_editable(name))


def _is_editable(name: str) -> bool:
    return PurePosixPath(name).name not in _OF_PROGRAMS and not name.endswith(_SUFFIXES_OF_PROGRAMS)


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / FILE_NAME
    try:
        content = parse_json(read_file(folder, FILE_NAME))
        if not isinstance(content, dict) or content.keys() != _KEYS or content["format"] != _MARK:
            raise ValueError("not the keys of this file")
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']!r}, known is {_VERSION}")
        _check_entries(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable_file("the digests of the checkpoint's files cannot be read", error, path) from error
    except ValueError as error:
        raise UnreadableCheckpointError(
            "the digests of the checkpoint's files are damaged",
            found=str(error),
            where=str(path),
            hint="use another copy; without this file, nothing is compared",
        ) from error
    return content


def _check_entries(content: Mapping[str, Any]) -> None:
    for key, kind in (("sha256", str), ("arrays", str), ("bytes", int), ("checksums", str)):
        entries = content[key]
        if not isinstance(entries, dict) or any(type(value) is not kind for value in entries.values()):
            raise ValueError(f"{key} has an invalid value")


def _content(file: OutputFile) -> Iterable[bytes]:
    """Yield all bytes of a file without records; bytes without a literal are zeros."""
    at = 0
    for position, data in sorted(file.literals):
        yield bytes(position - at)
        yield data
        at = position + len(data)
    yield bytes(file.length - at)


def _sha256(content: bytes | Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in [content] if isinstance(content, bytes) else content:
        digest.update(part)
    return digest.hexdigest()


def _sha256_of_arrays(header: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(declared_arrays(header), sort_keys=True).encode())
