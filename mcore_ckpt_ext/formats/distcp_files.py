"""The files of a `torch_dist` folder: concatenated archives, and `.metadata`, which is their index.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py, as Megatron uses them
(megatron/core/dist_checkpointing/strategies/torch.py, core_v0.8.0 to 0.19.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.planning.plan import TargetSlice
from mcore_ckpt_ext.planning.write_plan import OutputFile, Record, WriteItem
from mcore_ckpt_ext.storage.archive_writer import ArchivePlan, plan_archive, plan_tensor
from mcore_ckpt_ext.storage.pickle_stubs import placeholder_class
from mcore_ckpt_ext.storage.pickling import INDEX_PROTOCOL, DeclaredTensor, dumps, named_object

FILE_BYTES = 512 << 20
# Alignment of archives in a file, as of records in an archive: direct writes need aligned elements, see
# `storage/direct.py`.
_ALIGNMENT = 64
_METADATA = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class Chunk:
    """A stored part of an array: its position in the array, and the slice of model space in it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    wanted: TargetSlice


@dataclass(frozen=True)
class Array:
    """An array and its sharded key; `natural_shape` is set if the array is stored reshaped."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]
    natural_shape: tuple[int, ...] | None = None


class DistcpFiles:
    """Builds `.distcp` files of limited size from concatenated archives, and their index."""

    def __init__(self, file_bytes: int = FILE_BYTES) -> None:
        self._file_bytes = file_bytes
        self._files: list[OutputFile] = []
        self._literals: list[tuple[int, bytes]] = []
        self._position = 0
        self._records: list[Record] = []
        self._entries: dict[str, Any] = {}
        self._places: dict[Any, Any] = {}
        self._shapes: dict[str, Any] = {}

    def add_object(self, key: str, value: Any, *, wrapped: bool = True) -> None:
        """Add a pickled object; `wrapped`: inside a list, as Megatron does where it calls the planner itself."""
        plan = plan_archive([value] if wrapped else value)
        self._entries[key] = named_object(_METADATA, "BytesStorageMetadata", {})
        self._append(plan, key, None)

    def add_array(self, array: Array) -> None:
        """Add the chunks of an array."""
        chunks = []
        dtype = getattr(torch, array.dtype)
        for chunk in array.chunks:
            plan = plan_tensor(DeclaredTensor(dtype, chunk.sizes, chunk.wanted))
            name = self._append(plan, array.key, chunk.offsets)
            (tensor,) = plan.tensors
            start = self._position - plan.length
            self._records.append(
                Record(
                    name,
                    start + tensor.offset,
                    array.dtype,
                    tensor.numel,
                    (WriteItem(0, chunk.wanted),),
                    tuple(start + place for place in tensor.checksums),
                )
            )
            place = {"offsets": torch.Size(chunk.offsets), "sizes": torch.Size(chunk.sizes)}
            chunks.append(named_object(_METADATA, "ChunkStorageMetadata", place))
        properties = named_object(_METADATA, "TensorProperties", _properties(dtype))
        state = {"properties": properties, "size": torch.Size(array.shape), "chunks": chunks}
        self._entries[array.key] = named_object(_METADATA, "TensorStorageMetadata", state)
        natural = array.natural_shape
        self._shapes[array.key] = {} if natural is None else {"nd_reformulated_orig_global_shape": natural}

    def finish(self, with_shapes: bool) -> tuple[list[OutputFile], list[Record], bytes]:
        """Return all files, their records, and a pickled `.metadata`.

        `with_shapes`: whether `.metadata` has `mcore_data` (0.8 to 0.15).
        """
        self._close()
        state = {
            "state_dict_metadata": self._entries,
            "planner_data": None,
            "storage_data": self._places,
            "storage_meta": None,
            "version": None,
        }
        if with_shapes:
            state["mcore_data"] = self._shapes
        return self._files, self._records, dumps(named_object(_METADATA, "Metadata", state), INDEX_PROTOCOL)[0]

    def _append(self, plan: ArchivePlan, key: str, offsets: tuple[int, ...] | None) -> str:
        self._position = -(-self._position // _ALIGNMENT) * _ALIGNMENT
        if self._position and self._position + plan.length > self._file_bytes:
            self._close()
        name = self._name
        index = {"fqn": key, "index": None} | ({} if offsets is None else {"offset": torch.Size(offsets)})
        place = {"relative_path": name, "offset": self._position, "length": plan.length}
        info = named_object("torch.distributed.checkpoint.filesystem", "_StorageInfo", place)
        self._places[named_object(_METADATA, "MetadataIndex", index)] = info
        self._literals += [(self._position + at, data) for at, data in plan.literals]
        self._position += plan.length
        return name

    @property
    def _name(self) -> str:
        return f"__0_{len(self._files)}.distcp"

    def _close(self) -> None:
        if self._position:
            self._files.append(OutputFile(self._name, self._position, tuple(self._literals)))
            self._literals = []
            self._position = 0


def _properties(dtype: torch.dtype) -> tuple[object, ...]:
    """The state of `TensorProperties`.

    Its fields: dtype, layout, requires_grad, memory format (0: contiguous), pin_memory.
    """
    memory_format = placeholder_class(_METADATA, "_MEM_FORMAT_ENCODING")
    return dtype, torch.strided, False, memory_format(0), False
