"""Lets torch's distributed checkpoint read a checkpoint of any format as if it were `fsdp_dtensor`."""

from __future__ import annotations

import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from mcore_ckpt_ext.defaults import DEFAULT_WORKERS
from mcore_ckpt_ext.formats.fsdp.writer import FsdpArray
from mcore_ckpt_ext.operations.block_reader import BlockReader
from mcore_ckpt_ext.planning.write_plan import Block, Record, WriteItem
from mcore_ckpt_ext.storage.dtypes import with_torch_dtypes


class VirtualStorageReader(StorageReader):
    """Reads each part of an array from its place in the checkpoint, and verifies masters against weights."""

    def __init__(self, arrays: Mapping[str, FsdpArray], objects: Mapping[str, Any], filler: BlockReader) -> None:
        """Args: the arrays and objects of `FsdpTarget`, by key; the reader of their content."""
        self._arrays = arrays
        self._objects = objects
        self._filler = filler
        self.bytes_read = 0

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index that an `fsdp_dtensor` folder would have, each array in one chunk."""
        entries: dict[str, Any] = {key: BytesStorageMetadata() for key in self._objects}
        for key, array in self._arrays.items():
            whole = ChunkStorageMetadata(torch.Size([0] * len(array.shape)), torch.Size(array.shape))
            properties = TensorProperties(getattr(torch, array.tensor.dtype))
            entries[key] = TensorStorageMetadata(properties, torch.Size(array.shape), [whole])
        return Metadata(entries)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan.

        Raises:
            ProofError: a master does not round to its weight.
            CheckpointError: the checkpoint is damaged or incomplete.
        """
        tensors = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._pickle(item.storage_index.fqn))
            else:
                tensors.append((item, planner.resolve_tensor(item).detach()))
        with ThreadPoolExecutor(DEFAULT_WORKERS, thread_name_prefix="mcore_ckpt_ext") as pool:
            for _ in pool.map(lambda pair: self._fill(*pair), tensors):
                pass
        for item, tensor in tensors:
            planner.commit_tensor(item, tensor)
            self.bytes_read += tensor.nbytes
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _pickle(self, key: str) -> io.BytesIO:
        data = io.BytesIO()
        torch.save(with_torch_dtypes(self._objects[key]), data)
        data.seek(0)
        return data

    def _fill(self, item: ReadItem, tensor: torch.Tensor) -> None:
        array = self._arrays[item.storage_index.fqn]
        numel = prod(tensor.shape)
        in_place = tensor.device.type == "cpu" and tensor.is_contiguous()
        room = tensor.view(-1) if in_place else torch.empty(numel, dtype=tensor.dtype)
        placed = WriteItem(0, array.target_slice(item.storage_offsets, item.lengths))
        record = Record(array.key, 0, array.tensor.dtype, numel, (placed,))
        self._filler.fill(record, Block(0, numel, (placed,)), room)
        if not in_place:
            tensor.copy_(room.view(tensor.shape))

    def set_up_storage_reader(self, *_: Any, **__: Any) -> None:
        """Do nothing: no setup is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged: every rank reads its own items."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged: every rank reads its own items."""
        return plans

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: the reader has no state."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: the reader belongs to one checkpoint."""
        return False
