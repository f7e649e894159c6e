"""Records the SHA-256 of every file and tensor of a checkpoint, and compares it with a record.

Tensors are recorded in model space: a conversion to another format or layout changes all files and no tensor.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from mcore_ckpt_ext.communicator import run_on_first
from mcore_ckpt_ext.errors import (
    ContentError,
    UnreadableCheckpointError,
    quantity,
    reraise_as_unreadable,
    unreadable_file,
)
from mcore_ckpt_ext.formats.listing import Listing
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.findings import RECORDED_FILES, RECORDED_TENSORS, Check, Results, error
from mcore_ckpt_ext.operations.integrity import digest_of_file
from mcore_ckpt_ext.operations.reading import BLOCK_ELEMENTS, BlockMemory, blocks, with_cache
from mcore_ckpt_ext.operations.workers import Workers
from mcore_ckpt_ext.storage.atomic_files import check_report, write_report
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.manifest import Manifest, TensorDigest, differing_tensors, is_manifest, manifest_text
from mcore_ckpt_ext.storage.paths import file_sizes
from mcore_ckpt_ext.transfer import Transfer, read_slice

_MANIFEST = "the manifest"
STORED = "stored"
"""The kind of tensors that are recorded as they are stored, because their model is unknown."""
Key = tuple[str, str]
"""Kind and name of a tensor."""
TensorSource = CheckpointView | Listing
"""The source of tensors: an open checkpoint, or the stored tensors of a folder whose model is unknown."""


def check_manifest_path(path: Path) -> None:
    """Refuse to write a manifest over another file.

    Raises:
        UsageError: there is a file that is no manifest, or no folder to write to.
    """
    check_report(
        path,
        is_manifest,
        what=_MANIFEST,
        conflict="--record would overwrite something that is no manifest",
        earlier="an earlier manifest",
    )


class TensorHash:
    """The SHA-256 of a tensor that is read block by block, in order."""

    def __init__(self, kind: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        self._of = (kind, name, dtype, shape)
        self._sha256 = hashlib.sha256()

    def add(self, values: torch.Tensor) -> None:
        """Add the next block."""
        self._sha256.update(memoryview(values.contiguous().view(torch.uint8).numpy()))

    @property
    def digest(self) -> TensorDigest:
        """The digest of all blocks so far."""
        return TensorDigest(*self._of, self._sha256.hexdigest())


class FileHash:
    """The SHA-256 of a file whose tensors are read anyway, in the order of their offsets."""

    def __init__(self, reader: FolderReader, file: str) -> None:
        self._reader = reader
        self._file = file
        self._sha256 = hashlib.sha256()
        self._position = 0
        self._is_readable = True

    def read_until(self, offset: int) -> None:
        """Read and add the bytes before `offset` that have not been added."""
        try:
            while self._is_readable and (count := min(offset - self._position, BLOCK_ELEMENTS)) > 0:
                self._add(memoryview(self._reader.read(self._file, self._position, count)))
        except UnreadableCheckpointError:
            self._is_readable = False

    def add(self, values: torch.Tensor) -> None:
        """Add the next elements of the file."""
        if self._is_readable:
            self._add(memoryview(values.view(torch.uint8).numpy()))

    def finish(self) -> str | None:
        """Read what follows the last tensor, and return the digest; None if a part cannot be read."""
        self.read_until(self._reader.size(self._file))
        return self._sha256.hexdigest() if self._is_readable else None

    def _add(self, data: memoryview) -> None:
        self._sha256.update(data)
        self._position += len(data)


@dataclass
class Digests:
    """SHA-256 that other checks have computed: of tensors, and of files by their path in the folder."""

    tensors: list[TensorDigest] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """The files and tensors of a checkpoint that a manifest records.

    Attributes:
        folder: the checkpoint's folder.
        source: its tensors; None if it cannot be opened.
        digests: SHA-256 that other checks have computed; only what they lack is read.
        workers: the threads that share the reading; each process has all results.
    """

    folder: Path
    source: TensorSource | None
    digests: Digests
    workers: Workers

    def write(self, path: Path) -> None:
        """Write the manifest, atomically and by the first process.

        If it lies in the folder, it does not list itself.

        Raises:
            CheckpointError: a tensor or a file cannot be read.
            DestinationError: the manifest cannot be written.
        """
        manifest = Manifest(self.file_digests(path), tuple(self.tensor_digests()))
        run_on_first(self.workers.team, lambda: write_report(path, manifest_text(manifest), what=_MANIFEST))

    def compare(self, manifest: Manifest, path: Path, results: Results, *, files_suffice: bool = True) -> None:
        """Compare the files with a manifest, and the tensors if a file differs.

        Args:
            manifest: the recorded digests.
            path: the manifest's path; if it lies in the folder, it is no file of the checkpoint.
            results: receives findings and checks.
            files_suffice: all tensors are in these files, so that equal files mean equal tensors.
        """
        before = len(results.findings)
        try:
            digests = self.file_digests(path)
        except UnreadableCheckpointError as problem:
            results.findings.append(error(RECORDED_FILES, str(self.folder), str(problem)))
            return
        for name, digest in manifest.files.items():
            where = str(self.folder / name)
            if name not in digests:
                results.findings.append(error(RECORDED_FILES, where, "missing: it is recorded", name))
            elif digests[name] != digest:
                message = f"its SHA-256 is {digests[name][:16]}..., recorded is {digest[:16]}..."
                results.findings.append(error(RECORDED_FILES, where, message, name))
        for name in sorted(digests.keys() - manifest.files.keys()):
            results.findings.append(error(RECORDED_FILES, str(self.folder / name), "it is not recorded", name))
        results.checks.append(Check(RECORDED_FILES, f"SHA-256 of {quantity(len(manifest.files), 'file')}"))
        if len(results.findings) > before or not files_suffice:
            self.compare_tensors(manifest, results)
        elif manifest.has_tensors:
            message = f"{quantity(len(manifest.tensors), 'tensor')}, in files that are as recorded"
            results.checks.append(Check(RECORDED_TENSORS, message))

    def compare_tensors(self, manifest: Manifest, results: Results) -> None:
        """Compare the tensors with a manifest, not the files, and append findings and checks to `results`."""
        if not manifest.has_tensors or self.source is None:
            message = "the checkpoint cannot be opened" if manifest.has_tensors else "the manifest lists files alone"
            results.checks.append(Check(RECORDED_TENSORS, message, done=False))
            return
        try:
            digests = self.tensor_digests()
        except UnreadableCheckpointError as problem:
            results.findings.append(error(RECORDED_TENSORS, str(self.folder), str(problem)))
            return
        for tensor, message in differing_tensors(manifest.tensors, digests):
            results.findings.append(error(RECORDED_TENSORS, f"{tensor.kind} {tensor.name}", message))
        results.checks.append(Check(RECORDED_TENSORS, f"SHA-256 of {quantity(len(manifest.tensors), 'tensor')}"))

    def file_digests(self, manifest: Path) -> dict[str, str]:
        """Return the SHA-256 of the folder's files, by path in the folder, without the manifest itself.

        Raises:
            UnreadableCheckpointError: a file cannot be read, or is a link out of the folder; on every process.
        """
        manifest_path = manifest.absolute()
        files = sorted(file_sizes(self.folder).items())
        sizes = {name: size for name, size in files if (self.folder / name).absolute() != manifest_path}

        def digest(name: str) -> str | OSError:
            try:
                return digest_of_file(self.folder, name)
            except OSError as problem:
                return problem

        computed = self.digests.files
        unread = [name for name in sizes if name not in computed]
        digests = {name: computed[name] for name in sizes if name in computed}
        results = self.workers.map(digest, unread, sizes.__getitem__)
        for name, result in zip(unread, results, strict=True):
            if isinstance(result, OSError):
                raise unreadable_file("a file of the checkpoint cannot be read", result, self.folder / name) from result
            digests[name] = result
        return digests

    def tensor_digests(self) -> list[TensorDigest]:
        """Return the SHA-256 of each tensor, in model space for a checkpoint; none of what cannot be opened.

        Raises:
            UnreadableCheckpointError: a tensor cannot be read; on every process.
        """
        if self.source is None:
            return []
        tensors = _StoredTensors(self.source) if isinstance(self.source, Listing) else _ModelTensors(self.source)
        digest_by_key = {(hashed.kind, hashed.name): hashed for hashed in self.digests.tensors}
        unread = [key for key in tensors.keys if key not in digest_by_key]

        def digest(key: Key) -> TensorDigest | str:
            try:
                with reraise_as_unreadable(self.folder):
                    return tensors.digest(key)
            except ContentError as problem:
                return str(problem)

        results = self.workers.map(digest, unread, tensors.size)
        for key, result in zip(unread, results, strict=True):
            if isinstance(result, str):
                raise UnreadableCheckpointError(result)
            digest_by_key[key] = result
        return [digest_by_key[key] for key in tensors.keys]


class _ModelTensors:
    """The tensors of a checkpoint, in model space; thread-safe."""

    def __init__(self, checkpoint: CheckpointView) -> None:
        self.keys = [(kind, name) for kind in checkpoint.kinds() for name in checkpoint.names(kind)]
        self._transfer = Transfer(checkpoint.files.reader.past_cache(), workers=1)
        self._memory = BlockMemory()
        self._sources = {
            kind: with_cache(checkpoint.optimizer.state()) for kind in checkpoint.kinds() if kind != WEIGHT
        }
        self._sources[WEIGHT] = with_cache(checkpoint.model.weights())

    def size(self, key: Key) -> int:
        """Return the number of elements of a tensor."""
        tensor = self._sources[key[0]].logical_tensor(*key)
        return 0 if tensor is None else prod(tensor.shape)

    def digest(self, key: Key) -> TensorDigest:
        """Read a tensor and return its digest."""
        kind, name = key
        source = self._sources[kind]
        tensor = source.logical_tensor(kind, name)
        if tensor is None:
            raise UnreadableCheckpointError("a tensor is missing", where=f"{kind} {name}")
        hashed = TensorHash(kind, name, tensor.dtype, tensor.shape)
        for block in blocks((Region.whole(name, tensor.shape),)):
            hashed.add(read_slice(source, self._transfer, kind, block, allocate=self._memory.allocator(kind)))
        return hashed.digest


class _StoredTensors:
    """The tensors of a folder as they are stored; thread-safe."""

    def __init__(self, listing: Listing) -> None:
        self._tensors = {(STORED, tensor.name): tensor for tensor in listing}
        self.keys = list(self._tensors)
        self._transfer = Transfer(listing.reader.past_cache(), workers=1)

    def size(self, key: Key) -> int:
        """Return the number of elements of a tensor."""
        return prod(self._tensors[key].shape)

    def digest(self, key: Key) -> TensorDigest:
        """Read a tensor and return its digest."""
        tensor = self._tensors[key]
        hashed = TensorHash(STORED, tensor.name, tensor.extent.dtype, tensor.shape)
        numel = prod(tensor.shape)
        for start in range(0, numel, BLOCK_ELEMENTS):
            count = min(BLOCK_ELEMENTS, numel - start)
            hashed.add(self._transfer.elements(tensor.extent, tensor.first + start, count))
        return hashed.digest
