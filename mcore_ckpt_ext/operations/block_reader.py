"""Fills the blocks of a conversion's output: reads content, verifies masters, rounds and quantizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT, LogicalTensor
from mcore_ckpt_ext.operations.reading import with_cache
from mcore_ckpt_ext.optimizers.stored_scales import check_at_stored_scales
from mcore_ckpt_ext.planning.plan import Plan, Source, TargetSlice, derivation_of, make_plan, plans_of
from mcore_ckpt_ext.planning.write_plan import Block, QuantizedOutput, Record, WriteItem
from mcore_ckpt_ext.storage.checksums import Checksums
from mcore_ckpt_ext.storage.crc32 import Piece
from mcore_ckpt_ext.storage.scaled import block_scales, encode
from mcore_ckpt_ext.transfer import Transfer, read_wanted


class BlockReader:
    """Reads the content of blocks, and verifies the masters in them."""

    def __init__(self, checkpoint: CheckpointView, accept_lost: bool) -> None:
        self.proven = 0
        self._master_check = checkpoint.job.master_check
        self._derives_weights = checkpoint.optimizer.weights_derived_from_masters
        self._source = with_cache(checkpoint)
        self._checksums = Checksums(checkpoint.files.reader)
        # One thread, because the caller reads several records at once.
        self._transfer = Transfer(checkpoint.files.reader.past_cache(), workers=1, checksums=self._checksums)
        self._accept_lost = accept_lost
        self._lock = threading.Lock()

    def fill(self, record: Record, block: Block, elements: torch.Tensor) -> list[Piece]:
        """Read the content of one block of a record, and verify the masters in it.

        Returns:
            The pieces of the block whose checksums are known.

        Raises:
            ProofError: a master does not round to its weight.
            CheckpointError: the source is damaged or incomplete.
        """
        if record.quantized is not None:
            self._fill_quantized(record.quantized, block, elements)
            return []
        return self._fill_content(record, block, elements)

    def read_ahead(self, record: Record, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yield blocks of a record in their order, as `Transfer.read_ahead` does."""
        return self._transfer.read_ahead(blocks, partial(self._targets_of, record))

    def _targets_of(self, record: Record, block: Block) -> Iterator[tuple[Source, TargetSlice]]:
        """Yield what `fill` reads of a block, except what it arranges in another order or quantizes."""
        for placed in block.content if record.quantized is None else ():
            if placed.order is None:
                yield self._source, placed.wanted
                if placed.wanted.kind == FP32_PARAM and not self._derives_weights:
                    yield self._source, self._weights_of(placed.wanted)

    def note_written(self, record: Record) -> None:
        """Note the source records of an output record that an earlier run wrote, for `finish` to verify.

        Raises:
            CheckpointError: the source is damaged or incomplete.
        """
        for placed in record.content if record.quantized is None else record.quantized.content:
            target = placed.wanted
            if placed.order is not None:
                target = replace(target, slice=Slice.whole(target.slice.regions))
            for plan in plans_of(target, self._source, self._accept_lost):
                for read in plan.reads:
                    self._transfer.locate(read.extent)

    def finish(self, workers: int) -> None:
        """Compare the checksums of records of which only parts were read.

        Raises:
            UnreadableCheckpointError: a checksum differs.
        """
        with ThreadPoolExecutor(workers, thread_name_prefix="mcore_ckpt_ext") as pool:
            for compared in [pool.submit(verify) for verify in self._checksums.rest()]:
                compared.result()

    def _fill_quantized(self, matrix: QuantizedOutput, block: Block, elements: torch.Tensor) -> None:
        """Read the bands of a matrix that a block needs, one after the other, and quantize each."""
        unit = matrix.unit
        for band in range(block.start // unit, -(-block.stop // unit)):
            content = matrix.band(band)
            values = torch.zeros(content.stop - content.start)
            self._fill_content(None, content, values)
            rows = values.view(-1, matrix.columns)
            scales = block_scales(rows, matrix.width, matrix.name)
            made = scales if matrix.scales else encode(rows, scales, matrix.width).view(-1)
            start = band * unit - block.start
            elements[start : start + made.numel()].copy_(made)

    def _fill_content(self, record: Record | None, block: Block, elements: torch.Tensor) -> list[Piece]:
        rooms = [(placed, elements[placed.start : placed.stop]) for placed in block.content]
        pieces = self._read([(placed.wanted, room) for placed, room in rooms if placed.order is None])
        for placed, room in rooms:
            self._read_in_order(placed, room)
            if record is not None and record.dtype == "float16":
                _check_fits_float16(placed, room, self._read_placed if placed.order is None else self._read_in_order)
        begins = {id(room): placed.start * room.element_size() for placed, room in rooms}
        return [(begins[id(room)] + start, begins[id(room)] + stop, crc) for room, (start, stop, crc) in pieces]

    def _read_placed(self, placed: WriteItem, room: torch.Tensor) -> None:
        self._read([(placed.wanted, room)])

    def _read(self, parts: Sequence[tuple[TargetSlice, torch.Tensor]]) -> list[tuple[torch.Tensor, Piece]]:
        """Read slices: copy stored values, compute derived ones. Return the known pieces, with their memory."""
        stored = []
        for target, room in parts:
            if derivation_of(self._source, target.kind, target.slice.regions[0].name) is None:
                stored.append((target, room))
            else:
                room.copy_(read_wanted(self._source, self._transfer, target, self._accept_lost))
        return self._read_stored(stored)

    def _read_stored(self, parts: Sequence[tuple[TargetSlice, torch.Tensor]]) -> list[tuple[torch.Tensor, Piece]]:
        """Read slices, and verify the masters among them before any rounding."""
        exact = [
            torch.empty(room.numel()) if target.kind == FP32_PARAM and room.dtype != torch.float32 else room
            for target, room in parts
        ]
        plan = make_plan([target for target, _ in parts], self._source, self._accept_lost)
        self._transfer.execute(plan, exact)
        pieces = self._checksums.add_plan(plan, exact, self._transfer.locate)
        for index, ((target, room), values) in enumerate(zip(parts, exact, strict=True)):
            if target.kind == FP32_PARAM and not self._derives_weights:
                self._prove(target, values, plan, index)
            if values is not room:
                room.copy_(values)
        return [(parts[target][1], piece) for target, piece in pieces if exact[target] is parts[target][1]]

    def _read_in_order(self, placed: WriteItem, room: torch.Tensor) -> None:
        """Read the rows or columns that hold a part of a matrix, and arrange its elements as in the record."""
        if placed.order is None:
            return
        reading = placed.order.regions_to_read(placed.wanted.slice)
        matrix = Slice.whole(reading.regions)
        shift = placed.order.shift
        elements = torch.empty(matrix.numel, dtype=torch.float32 if shift else room.dtype)
        self._read([(replace(placed.wanted, slice=matrix), elements)])
        elements += shift
        ordered = elements.view(reading.shape).permute(reading.axes).reshape(-1)
        room.copy_(ordered[reading.before : reading.before + room.numel()])

    def _prove(self, target: TargetSlice, masters: torch.Tensor, plan: Plan, index: int) -> None:
        weight_target = self._weights_of(target)
        dtype = next(iter(weight_target.tensors.values())).dtype
        weights = torch.empty(masters.numel(), dtype=getattr(torch, dtype))
        weight_plan = make_plan([weight_target], self._source)
        self._transfer.execute(weight_plan, [weights])
        for fill in plan.fills:
            if fill.target == index:
                # These masters are not stored: padding of the vocabulary (zero on both sides), or accepted losses.
                masters[fill.start : fill.stop] = weights[fill.start : fill.stop]
        check_at_stored_scales(self._source, target.tensors, self._master_check, self._transfer).verify(
            masters,
            weights,
            lambda position: f"element {position} of a part of {target.slice.regions[0].name}",
            ": use another iteration",
        )
        with self._lock:
            self.proven += masters.numel()

    def _weights_of(self, masters: TargetSlice) -> TargetSlice:
        """Return the weights of the same elements."""
        tensors = {name: self._weight(name, tensor) for name, tensor in masters.tensors.items()}
        return replace(masters, kind=WEIGHT, tensors=tensors)

    def _weight(self, name: str, master: LogicalTensor) -> LogicalTensor:
        """Return the weight of a master, in the shape that the target requires."""
        weight = self._source.logical_tensor(WEIGHT, name)
        if weight is None:
            raise UnreadableCheckpointError("a parameter with optimizer state has no weight", where=name)
        return replace(weight, shape=master.shape)


def _check_fits_float16(
    placed: WriteItem, rounded: torch.Tensor, read: Callable[[WriteItem, torch.Tensor], None]
) -> None:
    """Refuse finite values that became infinite; `read` reads them again, into memory of another dtype."""
    if all(tensor.dtype == "float16" for tensor in placed.wanted.tensors.values()) or rounded.isfinite().all():
        return
    exact = torch.empty(rounded.numel())
    read(placed, exact)
    if (lost := exact.isfinite() & ~rounded.isfinite()).any():
        raise UnsupportedCheckpointError(
            "a value is too large for float16 and would become infinite",
            found=f"{exact[lost].abs().max().item():g}",
            expected=f"at most {torch.finfo(torch.float16).max:g}",
            where=placed.wanted.slice.regions[0].name,
            hint="choose another dtype: --dtype bfloat16",
        )
