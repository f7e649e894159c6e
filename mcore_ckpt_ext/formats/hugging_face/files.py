"""The files of weights of a Hugging Face folder to write, with the locations of their tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

from mcore_ckpt_ext.families.family import HuggingFaceTensor
from mcore_ckpt_ext.lazy_torch import torch
from mcore_ckpt_ext.model_space.names import module_and_leaf
from mcore_ckpt_ext.model_space.slices import Slice
from mcore_ckpt_ext.planning.write_plan import MatrixOrder, OutputFile, QuantizedOutput, Record, WriteItem
from mcore_ckpt_ext.storage.archive_writer import plan_archive
from mcore_ckpt_ext.storage.pickling import DeclaredTensor
from mcore_ckpt_ext.storage.safetensors import WRITER, Declared, lay_out_checked_file


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor to write; `quantized`: the part of a quantized matrix that it contains."""

    declared: Declared
    content: tuple[WriteItem, ...]
    quantized: QuantizedOutput | None = None


def is_linear(tensor: HuggingFaceTensor) -> bool:
    """Return whether fp8 applies to a tensor: a linear weight of attention, an MLP or an expert."""
    places = {module_and_leaf(region.name) for region in tensor.regions}
    return all(module.startswith("linear_") and leaf == "weight" for module, leaf in places)


def not_quantized(tensors: Sequence[WrittenTensor]) -> list[str]:
    """Return the names of modules with unquantized matrices, as readers of `config.json` expect them."""
    return [
        tensor.declared.key.removesuffix(".weight")
        for tensor in tensors
        if tensor.quantized is None and len(tensor.declared.shape) > 1 and tensor.declared.key.endswith(".weight")
    ]


def matrix_order_of(tensor: HuggingFaceTensor, part: Slice) -> MatrixOrder | None:
    """Return how a tensor's elements are arranged if they differ from Megatron's, else None.

    Args:
        tensor: the tensor.
        part: a parameter's part of it.
    """
    if not tensor.transposed and tensor.interleaved == 1 and not tensor.shift:
        return None
    rows = sum(region.sizes[0] for region in part.regions)
    return MatrixOrder(rows, tensor.transposed, tensor.interleaved, tensor.shift)


def shards_of(tensors: Sequence[WrittenTensor], limit: int) -> Iterator[list[WrittenTensor]]:
    """Split tensors into files of limited size as huggingface_hub does.

    Source: `split_torch_state_dict_into_shards`.
    """
    shard: list[WrittenTensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.declared.nbytes > limit:
            yield shard
            shard = []
            size = 0
        shard.append(tensor)
        size += tensor.declared.nbytes
    yield shard


def plain_file(name: str, shard: Sequence[WrittenTensor]) -> tuple[OutputFile, list[Record]]:
    """Plan a safetensors file, and the location of each tensor."""
    file, starts, checksums = lay_out_checked_file(name, [tensor.declared for tensor in shard])
    records = [
        Record(
            name,
            start,
            tensor.declared.dtype,
            prod(tensor.declared.shape),
            tensor.content,
            quantized=tensor.quantized,
            checksum_texts=(checksum,),
        )
        for tensor, start, checksum in zip(shard, starts, checksums, strict=True)
    ]
    return file, records


def pickled_file(name: str, shard: Sequence[WrittenTensor]) -> tuple[OutputFile, list[Record]]:
    """Plan a file in the format of `torch.save`, and the location of each tensor."""
    state = OrderedDict(
        (tensor.declared.key, DeclaredTensor(getattr(torch, tensor.declared.dtype), tensor.declared.shape, tensor))
        for tensor in shard
    )
    archive = plan_archive(state, WRITER)
    records = []
    for archived in archive.tensors:
        tensor = cast("WrittenTensor", archived.tag)
        records.append(
            Record(name, archived.offset, tensor.declared.dtype, archived.numel, tensor.content, archived.checksums)
        )
    return OutputFile(name, archive.length, archive.literals), records
