"""Infers the job that wrote a `torch_dist` checkpoint from its index.

The result has the names of Megatron's arguments.

Parallel sizes are inferred only from traces of ranks (the grid of random states, the groups of gradient buffers, the
files of writers), and sizes of the model from its arrays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mcore_ckpt_ext.model_space.anatomy import (
    BLOCKS,
    is_output_layer,
    is_word_embeddings,
    pipelined_block,
    word_embeddings_in,
)
from mcore_ckpt_ext.model_space.names import is_of_experts, parse
from mcore_ckpt_ext.optimizers.bucket_formats import GROUP_KEY
from mcore_ckpt_ext.planning.array_location import RawArray
from mcore_ckpt_ext.storage.dcp_metadata import DcpIndex
from mcore_ckpt_ext.storage.index_entries import StoredArray

_DTYPES = re.compile(r"\.dtype_\(torch\.(\w+), torch\.(\w+)\)\.")
_FILE = re.compile(r"(?:^|/)__(\d{1,9})_\d+\.distcp$", re.ASCII)
TENSOR = "tensor_model_parallel_size"
PIPELINE = "pipeline_model_parallel_size"
EXPERT = "expert_model_parallel_size"
EXPERT_TENSOR = "expert_tensor_parallel_size"


def infer_layout(index: DcpIndex, grid: tuple[int, ...] | None, known: Mapping[str, Any]) -> dict[str, int]:
    """Infer the sizes of the parallel layout from the index, as far as possible.

    Args:
        index: the index of the checkpoint.
        grid: the ranks that stored their random state: (pipeline, tensor[, data]).
        known: other known properties; used only for sizes that no index shows.
    """
    groups = _groups(index)
    sizes: dict[str, int] = {}
    if grid is not None:
        sizes = {PIPELINE: grid[0], TENSOR: grid[1]}
    elif 0 in groups and (tensor := _bands(index.arrays) or known.get(TENSOR)) and groups[0] % tensor == 0:
        sizes = {PIPELINE: groups[0] // tensor, TENSOR: tensor}
    if not sizes or not groups:
        # If optimizers are not flat, files and chunks come from the last writer, which may be a converter.
        return sizes
    if len(groups) > 1 + bool(known.get("overlap_param_gather_with_optimizer_step")):
        sizes |= _experts(index, groups[max(groups)], sizes[PIPELINE])
    world = 1 + max(_writers(index), default=-1)
    model = sizes[TENSOR] * sizes[PIPELINE]
    context = known.get("context_parallel_size")
    if world and world % model == 0:
        sizes["world_size"] = world
        if isinstance(context, int) and context > 0 and world % (model * context) == 0:
            sizes["data_parallel_size"] = world // (model * context)
        elif world == model:
            sizes |= {"context_parallel_size": 1, "data_parallel_size": 1}
    return sizes


def possible_layouts(index: DcpIndex) -> list[dict[str, int]]:
    """Return the tensor and pipeline sizes that flat optimizer state allows if nothing else shows them."""
    groups = _groups(index).get(0, 0)
    return [{TENSOR: size, PIPELINE: groups // size} for size in range(1, groups + 1) if groups % size == 0]


def infer_model_config(arrays: Mapping[str, StoredArray], names: Iterable[str]) -> dict[str, Any]:
    """Infer the numbers of layers and experts, widths, and whether embeddings are tied from the arrays."""
    names = list(names)
    parsed = [parse(name) for name in names]
    divided = pipelined_block(names) or BLOCKS[0]
    layers = {name.layer for name in parsed if name.layer is not None and name.block == divided}
    experts = {name.expert for name in parsed if name.expert is not None}
    table = word_embeddings_in(names)
    config: dict[str, Any] = {}
    if layers:
        config["num_layers"] = 1 + max(layers)
        config["num_experts"] = 1 + max(experts) if experts else None
    if table is not None and table in arrays:
        config["padded_vocab_size"], config["hidden_size"] = arrays[table].shape[:2]
    if table is not None:
        config["untie_embeddings_and_output_weights"] = any(map(is_output_layer, names))
    if any("position_embeddings" in name for name in names):
        config["position_embedding_type"] = "learned_absolute"
    if gradients := _gradients_in_fp32(arrays):
        config["accumulate_allreduce_grads_in_fp32"] = gradients == {"float32"}
    return config


def _groups(index: DcpIndex) -> dict[int, int]:
    """Return how many groups each chained optimizer has in flat buffers: one per model-parallel rank."""
    group_numbers: dict[int, set[int]] = {}
    for key in (*index.arrays, *index.objects):
        if match := GROUP_KEY.match(key):
            group_numbers.setdefault(int(match[1] or 0), set()).add(int(match[2]))
    return {child: 1 + max(groups) for child, groups in sorted(group_numbers.items())}


def _experts(index: DcpIndex, groups: int, pipeline: int) -> dict[str, int]:
    """Infer sizes from an experts' optimizer: a group per expert-tensor, expert and pipeline rank."""
    keys = [key for key in index.arrays if is_of_experts(key) and key.endswith("linear_fc2.weight")]
    columns = {
        len({chunk.offsets[-1] for chunk in index.arrays[key].chunks}) for key in keys if index.arrays[key].shape
    }
    if len(columns) != 1 or groups % (pipeline * max(columns)):
        return {}
    return {EXPERT_TENSOR: max(columns), EXPERT: groups // (pipeline * max(columns))}


def _bands(arrays: Mapping[str, StoredArray]) -> int | None:
    """Return the number of row blocks in which an embedding is stored; None if there is no embedding.

    Every tensor-parallel rank stores one (core_v0.7.0 to 0.19.2).
    """
    for is_table in (is_word_embeddings, is_output_layer):
        for key in filter(is_table, arrays):
            return len({chunk.offsets[0] for chunk in arrays[key].chunks})
    return None


def _writers(index: DcpIndex) -> set[int]:
    """Return the global ranks that wrote a file."""
    chunks = (chunk.extent for array in index.arrays.values() for chunk in array.chunks)
    files = {extent.file for extent in chunks if not isinstance(extent, RawArray)}
    files |= {stored.file for stored in index.objects.values()}
    return {int(match[1]) for file in files if (match := _FILE.search(file))}


def _gradients_in_fp32(arrays: Mapping[str, StoredArray]) -> set[str]:
    """Return the dtypes of gradients of parameters that are not fp32, from the keys of flat buffers."""
    matches = (match for key in arrays if (match := _DTYPES.search(key)))
    return {match[2] for match in matches if match[1] != "float32"}
