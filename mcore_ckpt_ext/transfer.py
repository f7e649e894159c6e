"""Executes read plans; no other module moves tensor bytes out of a checkpoint.

Elements are read directly into the destination if it is on the CPU and has the stored dtype, else through a block of
bounded size. This module depends on no format and no framework.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeAlias

from mcore_ckpt_ext.defaults import DEFAULT_WORKERS
from mcore_ckpt_ext.devices import is_staged
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.planning.array_location import Extent, QuantizedMatrix, ReorderedMatrix
from mcore_ckpt_ext.planning.overlap import Run, split_runs
from mcore_ckpt_ext.planning.plan import (
    Derivation,
    Plan,
    PlannedRead,
    Source,
    TargetSlice,
    derivation_of,
    make_plan,
    plans_of,
)
from mcore_ckpt_ext.storage.checksums import Checksums, is_plain
from mcore_ckpt_ext.storage.files import FolderReader
from mcore_ckpt_ext.storage.pinned import STAGE_BYTES, Stages
from mcore_ckpt_ext.storage.read_ahead import FileRange, Item
from mcore_ckpt_ext.storage.row_reader import RowReader, are_read_together, bytes_of, ranges_of
from mcore_ckpt_ext.storage.scaled import ReadCodes, decode, scale_reads
from mcore_ckpt_ext.storage.tensor_location import TensorLocation
from mcore_ckpt_ext.storage.tensor_locations import TensorLocations
from mcore_ckpt_ext.storage.torch_archive import TorchArchive

BLOCK_BYTES = 16 << 20
# Below this size, starting threads costs more than reading.
_BYTES_FOR_WORKERS = 1 << 20
# Memory that each fp8 number takes while it is decoded.
_DECODED_BYTES = 8
# Destinations by target index; a mapping may leave out targets for which the plan has no elements.
Destinations: TypeAlias = "Sequence[torch.Tensor] | Mapping[int, torch.Tensor]"
# Called with a target index and the range of elements (first, end) that have just been read.
OnRead = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements just read, and their destination: `count` rows of `length` elements, `stride` apart."""

    elements: torch.Tensor
    start: int
    length: int
    count: int
    stride: int

    def rows_of(self, destination: torch.Tensor) -> torch.Tensor:
        """Return the view of a 1-D contiguous destination that these elements fill, shaped (count, length)."""
        offset = destination.storage_offset() + self.start
        return destination.as_strided((self.count, self.length), (self.stride, 1), offset)

    def rows(self) -> torch.Tensor:
        """Return the elements, shaped (count, length)."""
        return self.elements.view(self.count, self.length)


class Transfer:
    """Copies tensors of read plans out of a checkpoint folder; caches where tensors lie in files."""

    def __init__(self, reader: FolderReader, workers: int | None = None, checksums: Checksums | None = None) -> None:
        """Args: the folder's reader, the number of threads, the checksums to compare (`TensorLocations`)."""
        self._reader = reader
        self._workers = workers or _threads()
        self._payloads = TensorLocations(reader, checksums)
        self._checksums = checksums
        self._rows = RowReader(reader)
        self._stages = Stages()

    def execute(self, plan: Plan, destinations: Destinations, on_read: OnRead | None = None) -> None:
        """Read the plan's elements into the destinations, 1-D contiguous tensors by target index.

        Args:
            plan: the elements to read.
            destinations: one tensor for each target of the plan.
            on_read: called with elements while they are in the processor's cache, in the thread that has read them. It
                is called for most elements that are read directly into CPU memory, and never twice for one element.
                Its errors stop the transfer.

        Raises:
            UnreadableCheckpointError: a file is damaged or too short; some elements may have been written already.
        """
        for fill in plan.fills:
            destinations[fill.target][fill.start : fill.stop].zero_()
        by_file = [list(reads) for _, reads in groupby(plan.reads, key=lambda read: read.extent.file)]
        if len(by_file) <= 1 or self._workers <= 1 or plan.bytes_read < _BYTES_FOR_WORKERS:
            for reads in by_file:
                self._read_all(reads, destinations, on_read)
            return
        with ThreadPoolExecutor(self._workers, thread_name_prefix="mcore_ckpt_ext") as pool:
            for done in [pool.submit(self._read_all, reads, destinations, on_read) for reads in by_file]:
                done.result()

    def read_ahead(
        self, items: Iterable[Item], targets: Callable[[Item], Iterable[tuple[Source, TargetSlice]]]
    ) -> Iterator[Item]:
        """Yield items in their order; of a remote folder, after requests for the elements of the next ones.

        Args:
            items: anything; taken one after the other, a few ahead.
            targets: returns what is read with an item, each with its source. It is not called for a local folder.
        """

        def reads(item: Item) -> Iterator[PlannedRead]:
            plans = (plan for source, target in targets(item) for plan in plans_of(target, source, accept_lost=True))
            return (read for plan in plans for read in plan.reads)

        return self._read_ahead(items, reads)

    def _read_ahead(self, items: Iterable[Item], reads: Callable[[Item], Iterable[PlannedRead]]) -> Iterator[Item]:
        """Request the ends of archives first: they say where in the archives the elements are."""

        def parts(places: Callable[[PlannedRead], Iterable[FileRange]]) -> Callable[[Item], Iterator[FileRange]]:
            return lambda item: (place for read in reads(item) for place in places(read))

        ends = self._reader.read_ahead(items, parts(lambda read: self._payloads.ends(read.extent)))
        return self._reader.read_ahead(ends, parts(lambda read: ranges_of(read, self.locate(read.extent))))

    def compare_checksums(self, plan: Plan, destinations: Sequence[torch.Tensor]) -> None:
        """Compare the checksums of the elements that a plan has just read, if this transfer has checksums.

        Raises:
            UnreadableCheckpointError: a checksum differs.
        """
        if self._checksums is not None:
            self._checksums.add_plan(plan, destinations, self.locate)

    def blocks(self, read: PlannedRead, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """Read the elements of one read in contiguous blocks of at most `block_bytes`."""
        payload = self.locate(read.extent)
        for run in read.runs.rows():
            yield from self._blocks_of(payload, run, read.extent, block_bytes)

    def _blocks_of(self, payload: TensorLocation, run: Run, extent: Extent, block_bytes: int) -> Iterator[Block]:
        source, target, length, count, source_stride, target_stride = run
        decodes = isinstance(extent, (ReorderedMatrix, QuantizedMatrix))
        size = (getattr(torch, extent.dtype) if decodes else payload.dtype).itemsize
        limit = max(1, block_bytes // (size if payload.scaled is None else _DECODED_BYTES))
        near = not decodes and are_read_together(length, count, source_stride, size)
        at_once = max(1, limit // (source_stride if near else length))
        for row in range(0, count, at_once):
            rows = min(at_once, count - row)
            for column in range(0, length, limit):
                width = min(limit, length - column)
                first = source + row * source_stride + column
                elements = self._read_rows(payload, first, width, rows, source_stride, extent)
                yield Block(payload.decode(elements), target + row * target_stride + column, width, rows, target_stride)

    def locate(self, extent: Extent) -> TensorLocation:
        """Return where the elements of a stored array lie; for errors see `TensorLocations.locate`."""
        if isinstance(extent, QuantizedMatrix):
            return self.locate(extent.codes)
        return self.locate(extent.array) if isinstance(extent, ReorderedMatrix) else self._payloads.locate(extent)

    def archive(self, file: str) -> TorchArchive:
        """Return the archive that fills a file and holds many objects; errors as `TensorLocations.archive`."""
        return self._payloads.archive(file)

    def elements(self, extent: Extent, first: int, count: int) -> torch.Tensor:
        """Read a few elements of a stored array without a plan; for errors see `execute`."""
        payload = self.locate(extent)
        if count == 0 or isinstance(extent, (ReorderedMatrix, QuantizedMatrix)):
            return payload.decode(self._read_rows(payload, first, count, 1, count, extent))
        size = payload.dtype.itemsize
        data = bytearray(count * size)
        self._reader.read_into(payload.file, payload.offset + first * size, memoryview(data))
        return payload.decode(torch.frombuffer(data, dtype=payload.dtype.torch))

    def _read_all(self, reads: Sequence[PlannedRead], destinations: Destinations, on_read: OnRead | None) -> None:
        for read in self._read_ahead(reads, lambda read: [read]):
            destination = destinations[read.target]
            payload = self.locate(read.extent)
            if is_plain(read, payload) and destination.dtype == payload.dtype.torch:
                if destination.device.type == "cpu":
                    show = None if on_read is None else partial(on_read, read.target)
                    self._rows.read(payload, read.runs.rows(), destination, show)
                    continue
                if is_staged(destination.device):
                    self._read_staged(payload, read.runs.rows(), destination)
                    continue
            for block in self.blocks(read):
                block.rows_of(destination).copy_(block.rows())
        self._stages.wait()

    def _read_staged(self, payload: TensorLocation, runs: Iterable[Run], destination: torch.Tensor) -> None:
        """Read elements to a device through host buffers: one is copied to the device while the next is read."""
        size = payload.dtype.itemsize
        for source, target, length, count, source_stride, target_stride in split_runs(runs, STAGE_BYTES // size):
            packed = source, 0, length, count, source_stride, length

            def fill(block: torch.Tensor, run: Run = packed) -> None:
                self._rows.read(payload, [run], block.view(payload.dtype.torch))

            places = destination.as_strided((count, length), (target_stride, 1), destination.storage_offset() + target)
            self._stages.send(count * length * size, fill, places)

    def _read_rows(
        self, payload: TensorLocation, first: int, length: int, count: int, stride: int, extent: Extent | None = None
    ) -> torch.Tensor:
        if isinstance(extent, QuantizedMatrix):
            codes = partial(self._read_one, self.locate(extent.codes))
            scales: ReadCodes = partial(self._read_one, self.locate(extent.scales))
            if extent.common_scale is not None:
                scales = scale_reads(scales, self._read_one(self.locate(extent.common_scale), 0, 1))
            rows = [decode(extent, first + row * stride, length, codes, scales) for row in range(count)]
            return rows[0] if count == 1 else torch.cat(rows)
        if isinstance(extent, ReorderedMatrix):
            return self._read_rearranged(payload, first, length, count, stride, extent)
        size = payload.dtype.itemsize
        span = (count - 1) * stride + length
        # The rows of a transposed matrix may span more than a block: the gaps between them would not fit.
        if are_read_together(length, count, stride, size) and span * size <= BLOCK_BYTES:
            together = torch.empty(span, dtype=payload.dtype.torch, device="cpu")
            self._reader.read_into(payload.file, payload.offset + first * size, bytes_of(together))
            # For a single column, reshape alone returns a view of the whole span; callers need contiguous elements.
            return together.as_strided((count, length), (stride, 1)).reshape(-1).contiguous()
        elements = torch.empty(count * length, dtype=payload.dtype.torch, device="cpu")
        memory = bytes_of(elements)
        for row in range(count):
            offset = payload.offset + (first + row * stride) * size
            self._reader.read_into(payload.file, offset, memory[row * length * size : (row + 1) * length * size])
        return elements

    def _read_one(self, payload: TensorLocation, first: int, length: int) -> torch.Tensor:
        return self._read_rows(payload, first, length, 1, length)

    def _read_rearranged(
        self, payload: TensorLocation, first: int, length: int, count: int, stride: int, extent: ReorderedMatrix
    ) -> torch.Tensor:
        """Read rows of a transposed or interleaved matrix; stored rows that hold the elements are read whole."""
        last = first + (count - 1) * stride + length
        top = first // extent.columns
        bottom = -(-last // extent.columns)
        height = extent.rows // extent.interleaved
        rows = [
            self._read_part(payload, part, max(top - part * height, 0), min(bottom - part * height, height), extent)
            for part in range(top // height, -(-bottom // height))
        ]
        elements = torch.cat(rows).view(-1)
        if extent.shift:
            elements = (elements.float() + extent.shift).to(elements.dtype)
        start = first - top * extent.columns
        return elements.as_strided((count, length), (stride, 1), start).reshape(-1).contiguous()

    def _read_part(
        self, payload: TensorLocation, part: int, top: int, bottom: int, extent: ReorderedMatrix
    ) -> torch.Tensor:
        """Read rows `[top, bottom)` of one of the interleaved parts: `[rows, columns]`."""
        array = extent.array if isinstance(extent.array, QuantizedMatrix) else None
        columns = extent.columns
        step = extent.interleaved
        begin = top * step + part
        span = (bottom - top - 1) * step + 1
        if extent.transposed:
            rows = self._read_rows(payload, extent.first + begin, span, columns, extent.rows, array)
            return rows.view(columns, span)[:, ::step].t().contiguous()
        rows = self._read_rows(payload, extent.first + begin * columns, span * columns, 1, span * columns, array)
        return rows.view(span, columns)[::step].contiguous()


def _threads() -> int:
    """Return a number of threads that gives each a core, if all ranks of this machine use as many.

    The number of ranks is torchrun's `LOCAL_WORLD_SIZE`. If this process is limited to so few cores that each rank may
    have as many of its own, it uses all of them; else the ranks share the cores.
    """
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    every = os.cpu_count() or 1
    ranks = max(1, int(local_size) if local_size.isdecimal() else 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    return max(1, min(DEFAULT_WORKERS, cores if cores * ranks <= every else cores // ranks))


Allocate: TypeAlias = "Callable[[int, torch.dtype], torch.Tensor]"
"""Makes a 1-D tensor with a number of elements and a dtype; its content may be arbitrary."""


def _fresh(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device="cpu")


def target_slice(source: Source, kind: str, part: Slice) -> TargetSlice:
    """Return a slice of model space as a target with the tensors of a source.

    Raises:
        KeyError: the source does not contain a tensor of it.
    """
    tensors = {region.name: source.logical_tensor(kind, region.name) for region in part.regions}
    stored = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name in tensors.keys() - stored.keys():
        raise KeyError(f"no {kind} {name} in this checkpoint")
    return TargetSlice(kind, part, stored)


def read_slice(
    source: Source, transfer: Transfer, kind: str, wanted: Slice, accept_lost: bool = False, allocate: Allocate = _fresh
) -> torch.Tensor:
    """Read a slice of model space into a 1-D tensor of the tensor's dtype, or compute it if derived.

    Args:
        source: the checkpoint.
        transfer: reads the checkpoint's files.
        kind: the kind of the tensors.
        wanted: the elements.
        accept_lost: return zero for elements that are not stored.
        allocate: makes the result's memory if the elements are stored; by default `torch.empty`.

    Raises:
        ModelMismatchError: the checkpoint does not hold all elements.
        CheckpointError: a file is damaged, or the inputs of derived values are invalid.
    """
    return read_wanted(source, transfer, target_slice(source, kind, wanted), accept_lost, allocate)


def read_wanted(
    source: Source, transfer: Transfer, wanted: TargetSlice, accept_lost: bool = False, allocate: Allocate = _fresh
) -> torch.Tensor:
    """Read a slice as `read_slice` does, with the dtypes of the target's tensors."""
    names = [region.name for region in wanted.slice.regions]
    derivation = derivation_of(source, wanted.kind, names[0])
    if derivation is not None:
        return _derive(derivation, transfer, wanted, accept_lost)
    # Plan first: planning fails if elements are missing, before memory is allocated for them.
    plan = make_plan([wanted], source, accept_lost)
    result = allocate(wanted.slice.numel, getattr(torch, wanted.tensors[names[0]].dtype))
    transfer.execute(plan, [result])
    transfer.compare_checksums(plan, [result])
    return result


def _derive(derivation: Derivation, transfer: Transfer, target: TargetSlice, accept_lost: bool) -> torch.Tensor:
    inputs = [read_wanted(source, transfer, needed, accept_lost) for source, needed in derivation.inputs(target)]
    result: torch.Tensor = derivation.values(target, inputs)
    return result
