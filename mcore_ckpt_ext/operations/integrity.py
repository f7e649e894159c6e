"""Checks that the bytes are those that were written: by torch's checksums and Megatron's manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from mcore_ckpt_ext.communicator import run_on_all
from mcore_ckpt_ext.errors import ContentError, UnreadableCheckpointError, join_some, quantity
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.layout.sidecar import FILE_NAME as SIDECAR_FILE
from mcore_ckpt_ext.operations.findings import (
    CHECKSUMS,
    FILE_DIGESTS,
    MANIFEST,
    Check,
    Finding,
    Results,
    error,
    warning,
)
from mcore_ckpt_ext.operations.workers import Workers
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.storage.checked_files import open_stream, read_file, translate_os_errors
from mcore_ckpt_ext.storage.checksums import LenientChecksums, verify_array
from mcore_ckpt_ext.storage.file_digests import changed_checksums, compare_digests
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.json_text import parse_json
from mcore_ckpt_ext.storage.paths import file_sizes
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

_INTEGRITY_MANIFEST = "integrity.json"
_ALGORITHM = "sha256"
# Files of the folder that Megatron cannot list: its manifest, and what this package adds.
_ADDED = {_INTEGRITY_MANIFEST, SIDECAR_FILE}
_HASH_BLOCK = 1 << 22
_UNDETECTED = "a flipped bit of a moment is not detected"

Advance = Callable[[int], None]
Archive = tuple[str, int, int]
Item = TypeVar("Item")


def check_file_digests(folder: Path, results: Results) -> bool:
    """Compare the small files of a folder with their digests, if it has any.

    Returns:
        True if the rest of the folder can be read with these files.
    """
    try:
        comparison = compare_digests(folder)
    except UnreadableCheckpointError as problem:
        results.findings.append(error(FILE_DIGESTS, str(folder), str(problem)))
        return False
    if comparison is None:
        return True
    if comparison.stale:
        message = f"they are of files that were written over: {comparison.stale}"
        results.checks.append(Check(FILE_DIGESTS, message, done=False))
        return True
    for file in comparison.changed:
        kind = warning if file.editable else error
        results.findings.append(kind(FILE_DIGESTS, str(folder / file.name), file.what, file.name))
    if comparison.compared:  # a legacy checkpoint has archives alone
        results.checks.append(Check(FILE_DIGESTS, f"SHA-256 of {quantity(comparison.compared, 'file')}"))
    results.links = comparison.checksums
    return all(file.editable for file in comparison.changed)


def check_links(
    reader: FolderReader, archives: Iterable[Archive], arrays: Iterable[RawArray], results: Results
) -> None:
    """Report whole files of another conversion or iteration, if the folder's digests link its files."""
    with suppress(ContentError):  # damage, which the comparison of the checksums themselves reports
        for file in changed_checksums(results.links, reader, archives, arrays):
            results.findings.append(error(FILE_DIGESTS, str(reader.folder / file.name), file.what, file.name))


class StoredChecksums:
    """The checksums of a checkpoint's own bytes; `unreadable`: files that are missing or truncated."""

    def __init__(self, checkpoint: CheckpointView, unreadable: set[str]) -> None:
        self._checkpoint = checkpoint
        self._archives = [archive for archive in checkpoint.files.archives() if archive[0] not in unreadable]
        arrays = [array for array in checkpoint.files.raw_arrays() if array.file not in unreadable]
        self._arrays = [array for array in arrays if array.crc is not None]
        self._bare = [array for array in arrays if array.crc is None]
        self._manifest = _read_integrity_manifest(checkpoint.files.folder)

    @property
    def _guarded(self) -> int:
        return sum(length for *_, length in self._archives) + sum(array.length for array in self._arrays)

    def bytes_to_read(self, content: int) -> int:
        """Return an estimate of the bytes that `verify` reads.

        The check of the parameters, which reads `content` bytes, compares their checksums at the same time.
        """
        return max(self._guarded, content) + self._manifest.nbytes

    def check(self, confirmed: LenientChecksums, workers: Workers, advance: Advance, results: Results) -> None:
        """Compare all checksums except those in `confirmed`, which are known to be right."""
        files = self._checkpoint.files
        check_links(files.reader, files.archives(), files.raw_arrays(), results)
        run_on_all(workers.team, lambda: _read_rest(confirmed, workers.count))
        for verified, verified_records in workers.team.gather((confirmed.verified, confirmed.verified_records)):
            confirmed.add(verified, verified_records)
        if self._manifest.exists:
            self._check_manifest(workers, advance, results)
        left = [archive for archive in self._archives if archive not in confirmed.verified]
        findings, unguarded = check_archives(
            self._checkpoint.files.reader, left, workers, advance, confirmed.verified_records, self._keys()
        )
        results.findings.extend(findings)
        bytes_unguarded = sum(length for *_, length in unguarded)
        arrays = [array for array in self._arrays if (array.file, array.offset, array.length) not in confirmed.verified]
        results.findings.extend(_check_raw_arrays(self._checkpoint, arrays, workers, advance))
        if guarded := self._guarded - bytes_unguarded:
            results.checks.append(Check(CHECKSUMS, f"CRC-32 of {quantity(guarded, 'byte')}"))
        if unlisted := sum(length for file, _, length in unguarded if file not in self._manifest.digests):
            saved = f"{quantity(unlisted, 'byte was', 'bytes were')} saved without any"
            message = f"{saved} (torch.serialization.set_crc32_options): {_UNDETECTED}"
            results.checks.append(Check(CHECKSUMS, message, done=False))
        if bare := sum(array.length for array in self._bare if array.file not in self._manifest.digests):
            message = f"{quantity(bare, 'byte')} of tensors have no checksums: {_UNDETECTED}"
            results.checks.append(Check(CHECKSUMS, message, done=False))

    def _keys(self) -> dict[tuple[str, int], str]:
        """Return Megatron's keys for archives, by file and position, if the checkpoint has an index."""
        keys: dict[tuple[str, int], str] = {}
        index = self._checkpoint.files.stored_index()
        if index is not None:
            for key, array in index.arrays.items():
                for chunk in array.chunks:
                    keys[chunk.extent.file, chunk.extent.offset] = f"{key}, chunk at {chunk.offsets}"
            for key, stored in index.objects.items():
                keys[stored.file, stored.offset] = key
        return keys

    def _check_manifest(self, workers: Workers, advance: Advance, results: Results) -> None:
        """Compare the files that the manifest lists, and name the others."""
        folder = self._checkpoint.files.folder
        manifest = self._manifest
        results.findings.extend(_check_integrity_manifest(folder, manifest, workers, advance))
        extent = f"SHA-256 of {quantity(len(manifest.digests), 'file')}, {quantity(manifest.nbytes, 'byte')}"
        results.checks.append(Check(MANIFEST, extent, done=bool(manifest.digests)))
        unlisted = sorted(file_sizes(folder).keys() - manifest.digests.keys() - _ADDED)
        if unlisted and not manifest.problem:
            message = f"it does not list {quantity(len(unlisted), 'file')} of the folder: {join_some(unlisted)}"
            results.findings.append(warning(MANIFEST, str(folder / _INTEGRITY_MANIFEST), message))


def check_archives(
    reader: FolderReader,
    archives: Sequence[Archive],
    workers: Workers,
    advance: Advance,
    confirmed: Mapping[Archive, Collection[str]] = MappingProxyType({}),
    keys: Mapping[tuple[str, int], str] = MappingProxyType({}),
) -> tuple[list[Finding], list[Archive]]:
    """Compare the CRC-32 of every record of every archive.

    Args:
        reader: reads the folder of the archives.
        archives: file, position and length of each.
        workers: the threads that share them.
        advance: called with the number of bytes that were read.
        confirmed: the records of each archive that are known to be right, and are left out.
        keys: the keys of archives by file and position, for findings.

    Returns:
        The damaged archives, and the archives without checksums.
    """

    def check(archive: Archive) -> Finding | bool:
        file, offset, length = archive
        try:
            opened = TorchArchive(reader, file, offset, length)
            if not opened.has_checksums:
                return False
            for name in opened.names:
                if name not in confirmed.get(archive, ()):
                    opened.verify_checksums(only=name)
        except ContentError as problem:
            label = keys.get((file, offset))
            return error(CHECKSUMS, file if label is None else f"{file}: {label}", str(problem), file, offset)
        finally:
            advance(length)
        return True

    outcomes = workers.map(check, archives, lambda archive: archive[2])
    damaged = [outcome for outcome in outcomes if isinstance(outcome, Finding)]
    return damaged, [archive for archive, outcome in zip(archives, outcomes, strict=True) if outcome is False]


def _read_rest(confirmed: LenientChecksums, workers: int) -> None:
    """Read the rest of records of which parts were read; `confirmed` then shows if they are right."""
    with ThreadPoolExecutor(workers) as pool:
        for compared in [pool.submit(compare) for compare in confirmed.rest()]:
            with suppress(UnreadableCheckpointError):
                compared.result()


def _check_raw_arrays(
    checkpoint: CheckpointView, arrays: Sequence[RawArray], workers: Workers, advance: Advance
) -> list[Finding]:
    """Compare the CRC-32 of every array that is stored as bare elements, if it has one."""

    def check(array: RawArray) -> Finding | None:
        try:
            verify_array(checkpoint.files.reader, array)
        except ContentError as problem:
            return error(CHECKSUMS, array.file, str(problem), array.file, array.offset)
        finally:
            advance(array.length)
        return None

    return _check_shares(workers, check, arrays, lambda array: array.length)


@dataclass(frozen=True)
class _IntegrityManifest:
    """The content of `integrity.json`.

    Attributes:
        exists: whether there is one.
        digests: the SHA-256 of each listed file, by name.
        nbytes: the size of these files in all.
        problem: the reason for which it cannot be used; empty if it can.
    """

    exists: bool = False
    digests: Mapping[str, object] = field(default_factory=dict)
    nbytes: int = 0
    problem: str = ""


def _read_integrity_manifest(folder: Path) -> _IntegrityManifest:
    """Read `integrity.json` (`--verify-integrity`, since core_v0.18.0), if there is one.

    Its content is `{"algorithm": "sha256", "files": {name: hex digest}}`, for the files in the same folder; not for
    those in subfolders.
    Source: `save_integrity_manifest` and `_verify_integrity_manifest_impl`,
    megatron/core/dist_checkpointing/validation.py, core_v0.18.0 to 0.19.2.
    """
    if not (folder / _INTEGRITY_MANIFEST).exists():
        return _IntegrityManifest()
    try:
        manifest = parse_json(read_file(folder, _INTEGRITY_MANIFEST))
        algorithm = manifest.get("algorithm", _ALGORITHM)
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        return _IntegrityManifest(exists=True, problem=f"it cannot be read: {type(problem).__name__}: {problem}")
    if algorithm != _ALGORITHM:
        return _IntegrityManifest(exists=True, problem=f"it uses {algorithm!r}, known is {_ALGORITHM}")
    sizes = file_sizes(folder)
    return _IntegrityManifest(exists=True, digests=files, nbytes=sum(sizes.get(name, 0) for name in files))


def _check_integrity_manifest(
    folder: Path, manifest: _IntegrityManifest, workers: Workers, advance: Advance
) -> list[Finding]:
    """Compare the SHA-256 of every file that `integrity.json` lists."""
    path = folder / _INTEGRITY_MANIFEST
    if manifest.problem:
        return [error(MANIFEST, str(path), manifest.problem)]

    def check(entry: tuple[str, object]) -> Finding | None:
        name, expected = entry
        if Path(name).name != name:
            return error(MANIFEST, str(path), f"it names something outside of the folder: {name!r}")
        try:
            digest = digest_of_file(folder, name, advance)
        except OSError as problem:
            return error(MANIFEST, str(folder / name), f"missing or unreadable: {problem.strerror}", name)
        if digest != expected:
            message = f"its SHA-256 is {digest[:16]}..., recorded is {str(expected)[:16]}..."
            return error(MANIFEST, str(folder / name), message, name)
        return None

    def size(entry: tuple[str, object]) -> int:
        with suppress(OSError):
            return (folder / Path(entry[0]).name).stat().st_size
        return 0

    return _check_shares(workers, check, list(manifest.digests.items()), size)


def digest_of_file(folder: Path, name: str, advance: Advance = lambda count: None) -> str:
    """Return the SHA-256 of a file of a folder.

    Raises:
        OSError: it is missing, or is a link out of the folder.
        StorageError: it cannot be read.
    """
    digest = hashlib.sha256()
    with open_stream(folder, name) as file, translate_os_errors(folder / name):
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def _check_shares(
    workers: Workers, check: Callable[[Item], Finding | None], items: Sequence[Item], size: Callable[[Item], int]
) -> list[Finding]:
    return [finding for finding in workers.map(check, items, size) if finding is not None]
