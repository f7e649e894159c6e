"""Checks the files and elements of a folder of weights as it is stored, without its model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from math import inf, prod

from mcore_ckpt_ext.errors import ContentError, quantity
from mcore_ckpt_ext.formats.accounts import Account
from mcore_ckpt_ext.formats.listing import About, ListedTensor, Listing
from mcore_ckpt_ext.formats.unread_state import UnreadState
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from mcore_ckpt_ext.operations.content import ValueCounts, count_values, odd_values
from mcore_ckpt_ext.operations.findings import (
    CHECKSUMS,
    COMPLETE,
    COVERED,
    DTYPES,
    SCALES,
    VALUES,
    Check,
    Finding,
    Results,
    error,
    warning,
)
from mcore_ckpt_ext.operations.integrity import check_archives, check_links
from mcore_ckpt_ext.operations.reading import BLOCK_ELEMENTS, BlockMemory
from mcore_ckpt_ext.operations.recording import STORED, Digests, FileHash, TensorHash
from mcore_ckpt_ext.operations.workers import Workers
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.planning.plan import ITEM_SIZE
from mcore_ckpt_ext.storage.crc32 import crc32
from mcore_ckpt_ext.storage.manifest import TensorDigest
from mcore_ckpt_ext.storage.safetensors import SUFFIX
from mcore_ckpt_ext.transfer import Transfer

_CHECKS: dict[About, str] = {"files": COMPLETE, "tensors": COVERED, "dtypes": DTYPES, "scales": SCALES}
_NO_MODEL = "no supported model describes its name and shape"
_NOT_READ = "its type is not supported"
_NOT_A_NUMBER = 255
"""NaN in an exponent of two in a byte (E8M0, OCP Microscaling Formats 1.0)."""


def check_listing(listing: Listing, results: Results) -> None:
    """Report problems with the files of a folder of weights; no element is read."""
    for problem in listing.problems:
        kind = error if problem.is_error else warning
        results.findings.append(kind(_CHECKS[problem.about], problem.where, problem.what, problem.file, problem.offset))
    results.checks.append(
        Check(COMPLETE, f"{quantity(listing.files, 'file')}, {quantity(len(listing.tensors), 'tensor')}")
    )
    if listing.dtypes:
        results.checks.append(Check(DTYPES, listing.dtypes))
    if scales := sum(tensor.is_scale for tensor in listing):
        results.checks.append(Check(SCALES, f"{quantity(scales, 'tensor')} of scales"))


def listed_bytes(listing: Listing) -> int:
    """Return the bytes of all tensors and archives."""
    return sum(map(_bytes_of, listing)) + sum(map(listing.reader.size, listing.archives))


def account_without_model(listing: Listing) -> Account:
    """Return the account of a folder of an unknown model: only described tensors have known shapes."""
    left = [tensor for tensor in listing if tensor.name not in listing.described]
    unread = [UnreadState(tensor.name, WEIGHT, _bytes_of(tensor), _NO_MODEL) for tensor in left]
    files = [UnreadState(file, WEIGHT, listing.reader.size(file), _NOT_READ) for file in sorted(listing.unread)]
    return Account(by_form=len(listing.tensors) - len(left), not_looked_at=(*files, *unread))


def check_stored_tensors(
    listing: Listing,
    workers: Workers,
    advance: Callable[[int], None],
    results: Results,
    *,
    digest_tensors: bool = False,
    digest_files: bool = False,
) -> Digests:
    """Check every element of a folder of weights, and its checksums.

    Args:
        listing: the listing of the folder.
        workers: the threads that share archives and tensors.
        advance: called with the number of bytes that were read.
        results: receives findings and checks.
        digest_tensors: also compute the SHA-256 of each tensor.
        digest_files: also compute that of safetensors files, each of which is then read by one thread.

    Returns:
        The SHA-256 that are requested.
    """
    check = _ElementCheck(listing, advance, digest_tensors=digest_tensors)
    files, single = _group_by_file(listing) if digest_files else ({}, list(listing))
    archives = [(file, 0, listing.reader.size(file)) for file in listing.archives]
    arrays = (tensor.extent for tensor in listing if isinstance(tensor.extent, RawArray))
    check_links(listing.reader, archives, arrays, results)
    damaged, unguarded = check_archives(listing.reader.past_cache(), archives, workers, advance)
    of_files = workers.map(check.file, list(files.items()), lambda item: sum(map(_bytes_of, item[1])))
    checked = workers.map(check.tensor, single, _bytes_of)
    digests = Digests()
    for file, (of_tensors, digest) in zip(files, of_files, strict=True):
        checked += of_tensors
        if digest is not None:
            digests.files[file] = digest
    digests.tensors += [digest for _, digest in checked if digest is not None]
    results.findings.extend(damaged)
    results.findings.extend(finding for findings, _ in checked for finding in findings)
    results.checks.append(Check(VALUES, quantity(sum(prod(tensor.shape) for tensor in listing), "element")))
    results.checks.extend(_extent_of_checksums(listing, sum(length for *_, length in unguarded)))
    return digests


def _extent_of_checksums(listing: Listing, without: int) -> Iterator[Check]:
    """Yield the number of bytes with checksums, and that of bytes without.

    `without`: the bytes of archives without checksums.
    """
    bare = [tensor for tensor in listing if isinstance(tensor.extent, RawArray) and tensor.extent.crc is None]
    without += sum(map(_bytes_of, bare))
    with_checksums = sum(_bytes_of(tensor) for tensor in listing if isinstance(tensor.extent, RawArray))
    with_checksums += sum(map(listing.reader.size, listing.archives)) - without
    if with_checksums:
        yield Check(CHECKSUMS, f"CRC-32 of {quantity(with_checksums, 'byte')}")
    if without or not with_checksums:
        extent = f"of {quantity(without, 'byte')} no checksums" if with_checksums else "no checksums"
        message = f"{extent} stored: record some with --record FILE, and compare with --against FILE"
        yield Check(CHECKSUMS, message, done=False)


def _group_by_file(listing: Listing) -> tuple[dict[str, list[ListedTensor]], list[ListedTensor]]:
    """Return the tensors of each safetensors file in the order of their offsets, and all other tensors."""
    files: defaultdict[str, list[ListedTensor]] = defaultdict(list)
    others: list[ListedTensor] = []
    for tensor in listing:
        (files[tensor.extent.file] if tensor.extent.file.endswith(SUFFIX) else others).append(tensor)
    for tensors in files.values():
        tensors.sort(key=lambda tensor: (tensor.extent.offset, tensor.extent.length))
    return files, others


def _bytes_of(tensor: ListedTensor) -> int:
    return prod(tensor.shape) * ITEM_SIZE[tensor.extent.dtype]


def _checksum_of(tensor: ListedTensor) -> int | None:
    return tensor.extent.crc if isinstance(tensor.extent, RawArray) else None


_Checked = tuple[list[Finding], TensorDigest | None]
"""The findings about a tensor, and its digest if requested."""


class _ElementCheck:
    """Checks one tensor at a time; thread-safe."""

    def __init__(self, listing: Listing, advance: Callable[[int], None], *, digest_tensors: bool) -> None:
        self._reader = listing.reader.past_cache()
        self._advance = advance
        self._digest_tensors = digest_tensors
        self._lowest_scale = -inf if listing.has_signed_scales else 0
        self._transfer = Transfer(self._reader, workers=1)
        self._memory = BlockMemory()

    def file(self, item: tuple[str, list[ListedTensor]]) -> tuple[list[_Checked], str | None]:
        """Check the tensors of a safetensors file; return the results, and the digest of a file read whole.

        The tensors do not overlap (`list_arrays`, storage/safetensors.py).
        """
        file, tensors = item
        whole = FileHash(self._reader, file)
        checked = [self.tensor(tensor, whole) for tensor in tensors]
        return checked, whole.finish()

    def tensor(self, tensor: ListedTensor, whole: FileHash | None = None) -> _Checked:
        """Check the elements of a tensor; return the findings, and its digest if requested.

        Args:
            tensor: the tensor.
            whole: receives the bytes of its file up to its end.
        """
        hashed = TensorHash(STORED, tensor.name, tensor.extent.dtype, tensor.shape) if self._digest_tensors else None
        try:
            findings = self._check(tensor, hashed, whole)
        except ContentError as problem:
            return [error(COMPLETE, tensor.name, str(problem), tensor.extent.file, tensor.extent.offset)], None
        return findings, None if hashed is None else hashed.digest

    def _check(self, tensor: ListedTensor, hashed: TensorHash | None, whole: FileHash | None) -> list[Finding]:
        payload = self._transfer.locate(tensor.extent)
        size = payload.dtype.itemsize
        numel = prod(tensor.shape)
        crc = 0
        begin = payload.offset + tensor.first * size
        tally = ValueCounts()
        wrong_scales = 0
        expected = _checksum_of(tensor)
        if whole is not None:
            whole.read_until(begin)
        for start in range(0, numel, BLOCK_ELEMENTS):
            block = self._memory.allocator("tensor")(min(BLOCK_ELEMENTS, numel - start), payload.dtype.torch)
            data = memoryview(block.view(torch.uint8).numpy())
            self._reader.read_into(payload.file, begin + start * size, data)
            crc = crc32(data, crc) if expected is not None else crc
            if hashed is not None:
                hashed.add(block)
            if whole is not None:
                whole.add(block)
            count_values("", block, tally)
            wrong_scales += _wrong_scales(block, self._lowest_scale) if tensor.is_scale else 0
            self._advance(len(data))
        findings: list[Finding] = []
        if expected is not None and crc != expected:
            message = "its checksum differs from the stored one: the tensor is damaged"
            findings.append(error(CHECKSUMS, tensor.name, message, payload.file, begin))
        if wrong_scales:
            message = f"{quantity(wrong_scales, 'scale is', 'scales are')} negative, infinite or not a number"
            findings.append(error(SCALES, tensor.name, message, payload.file, begin))
        else:
            findings.extend(odd_values(tensor.name, tally, payload.file, begin))
        return findings


def _wrong_scales(block: torch.Tensor, lowest: float) -> int:
    if block.dtype == torch.uint8:
        return int((block == _NOT_A_NUMBER).sum())
    values = block.float()
    return int((~torch.isfinite(values) | (values < lowest)).sum())
