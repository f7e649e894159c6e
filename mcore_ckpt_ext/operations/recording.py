"""Recording the SHA-256 of every file and tensor of a checkpoint, and comparing a checkpoint with what was recorded.

Tensors are recorded in model space: a conversion to another format or layout changes all files and no tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

from mcore_ckpt_ext.errors import CheckpointError, UnreadableCheckpointError, io_hint, reraise_as_unreadable
from mcore_ckpt_ext.formats.listing import ListedTensor, Listing
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.findings import RECORDED_FILES, RECORDED_TENSORS, Check, Results, error
from mcore_ckpt_ext.operations.integrity import digest_of_file
from mcore_ckpt_ext.operations.reading import BLOCK_ELEMENTS, Rooms, blocks, cached, threads
from mcore_ckpt_ext.storage.atomic_files import check_report, write_report
from mcore_ckpt_ext.storage.manifest import Manifest, TensorDigest, differing, is_manifest, manifest_text
from mcore_ckpt_ext.transfer import Transfer, read_slice

_MANIFEST = "the manifest"
STORED = "stored"
"""The kind of tensors that are recorded as they are stored, because their model is not known."""
Content = CheckpointView | Listing
"""What tensors are read from: an open checkpoint, or the stored tensors of a folder whose model is not known."""


def check_destination(path: Path) -> None:
    """Refuse to write a manifest over something else.

    Raises:
        UsageError: there is a file that is no manifest, or no folder to write it to.
    """
    check_report(
        path,
        is_manifest,
        what=_MANIFEST,
        conflict="--record would overwrite something that is no manifest",
        earlier="an earlier manifest",
    )


def record(path: Path, folder: Path, content: Content, workers: int) -> None:
    """Write the manifest of a checkpoint, which a reader sees whole or not at all.

    Args:
        path: the manifest; where it lies in the checkpoint's folder, it does not list itself.
        folder: the checkpoint's folder.
        content: its tensors.
        workers: threads.

    Raises:
        CheckpointError: a tensor or a file cannot be read.
        DestinationError: the manifest cannot be written.
    """
    manifest = Manifest(file_digests(folder, path, workers), tuple(tensor_digests(content, workers)))
    write_report(path, manifest_text(manifest), what=_MANIFEST)


def compare(
    manifest: Manifest,
    path: Path,
    folder: Path,
    content: Content | None,
    workers: int,
    results: Results,
    *,
    files_suffice: bool = True,
) -> None:
    """Compare the files of a checkpoint with a manifest, and its tensors if a file differs.

    Args:
        manifest: what was recorded.
        path: where it was read from; where it lies in the folder, it is no file of the checkpoint.
        folder: the checkpoint's folder.
        content: its tensors; None where it cannot be opened.
        workers: threads.
        results: where findings and checks are added.
        files_suffice: whether all tensors are in these files.
    """
    before = len(results.findings)
    try:
        found = file_digests(folder, path, workers)
    except UnreadableCheckpointError as problem:
        results.findings.append(error(RECORDED_FILES, str(folder), str(problem)))
        return
    for name, digest in manifest.files.items():
        if name not in found:
            results.findings.append(error(RECORDED_FILES, str(folder / name), "missing: it is recorded", name))
        elif found[name] != digest:
            what = f"its SHA-256 is {found[name][:16]}..., recorded is {digest[:16]}..."
            results.findings.append(error(RECORDED_FILES, str(folder / name), what, name))
    for name in sorted(found.keys() - manifest.files.keys()):
        results.findings.append(error(RECORDED_FILES, str(folder / name), "it is not recorded", name))
    results.checks.append(Check(RECORDED_FILES, f"SHA-256 of {len(manifest.files):,} files"))
    if len(results.findings) > before or not files_suffice:
        compare_tensors(manifest, content, workers, results)
    elif manifest.has_tensors:
        what = f"{len(manifest.tensors):,} tensors, in files that are as recorded"
        results.checks.append(Check(RECORDED_TENSORS, what))


def compare_tensors(manifest: Manifest, content: Content | None, workers: int, results: Results) -> None:
    """Compare the tensors of a checkpoint with a manifest, whatever its files are."""
    if not manifest.has_tensors or content is None:
        what = "the checkpoint cannot be opened" if manifest.has_tensors else "the manifest lists files alone"
        results.checks.append(Check(RECORDED_TENSORS, what, done=False))
        return
    try:
        with reraise_as_unreadable(content.folder):
            found = list(tensor_digests(content, workers))
    except CheckpointError as problem:
        results.findings.append(error(RECORDED_TENSORS, str(content.folder), str(problem)))
        return
    for tensor, what in differing(manifest.tensors, found):
        results.findings.append(error(RECORDED_TENSORS, f"{tensor.kind} {tensor.name}", what))
    results.checks.append(Check(RECORDED_TENSORS, f"SHA-256 of {len(manifest.tensors):,} tensors"))


def file_digests(folder: Path, manifest: Path, workers: int) -> dict[str, str]:
    """The SHA-256 of each file of a folder, by its path in the folder; without the manifest itself.

    Raises:
        UnreadableCheckpointError: a file cannot be read, or is a link out of the folder.
    """
    own = manifest.absolute()
    names = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.absolute() != own
    )

    def digest(name: str) -> str:
        try:
            return digest_of_file(folder, name)
        except OSError as problem:
            raise UnreadableCheckpointError(
                "a file of the checkpoint cannot be read", found=problem.strerror, where=str(folder / name),
                hint=io_hint(problem),
            ) from problem  # fmt: skip

    with threads(workers) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def tensor_digests(content: Content, workers: int) -> Iterator[TensorDigest]:
    """The SHA-256 of each tensor, those of a checkpoint in model space.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    with threads(workers) as pool:
        if isinstance(content, Listing):
            yield from pool.map(_StoredDigests(content), content)
        else:
            names = [(kind, name) for kind in content.kinds() for name in content.names(kind)]
            yield from pool.map(_model_space_digests(content), names)


def _model_space_digests(checkpoint: CheckpointView) -> Callable[[tuple[str, str]], TensorDigest]:
    transfer, rooms = Transfer(checkpoint.reader, workers=1), Rooms()
    sources = {kind: cached(checkpoint.optimizer) for kind in checkpoint.kinds() if kind != WEIGHT}
    sources[WEIGHT] = cached(checkpoint.weights)

    def digest(key: tuple[str, str]) -> TensorDigest:
        kind, name = key
        source, sha256 = sources[kind], hashlib.sha256()
        tensor = source.logical_tensor(kind, name)
        if tensor is None:
            raise UnreadableCheckpointError("a tensor is missing", where=f"{kind} {name}")
        for wanted in blocks((Region.whole(name, tensor.shape),)):
            _add(sha256, read_slice(source, transfer, kind, wanted, allocate=rooms.of(kind)))
        return TensorDigest(kind, name, tensor.dtype, tensor.shape, sha256.hexdigest())

    return digest


class _StoredDigests:
    """Digests of tensors as they are stored; to be called from several threads."""

    def __init__(self, listing: Listing) -> None:
        self._transfer = Transfer(listing.reader, workers=1)

    def __call__(self, tensor: ListedTensor) -> TensorDigest:
        sha256, numel = hashlib.sha256(), prod(tensor.shape)
        for start in range(0, numel, BLOCK_ELEMENTS):
            count = min(BLOCK_ELEMENTS, numel - start)
            _add(sha256, self._transfer.elements(tensor.extent, tensor.first + start, count))
        return TensorDigest(STORED, tensor.name, tensor.extent.dtype, tensor.shape, sha256.hexdigest())


def _add(sha256: hashlib._Hash, values: torch.Tensor) -> None:
    sha256.update(memoryview(values.contiguous().view(torch.uint8).numpy()))
