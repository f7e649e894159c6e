"""What one rank of the job that wrote a checkpoint held: its parameters, and its part of each.

Everything follows from the stored weights, whose chunks are the tensor-parallel shards, and from the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mcore_ckpt_ext.layout.parallel import ParallelLayout, layers_by_chunk
from mcore_ckpt_ext.layout.parameter_order import WORD_EMBEDDINGS, split_layer
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.model_space.tensors import LogicalTensor

# Stored with the model, but module buffers and not parameters (moe/router.py: `expert_bias`,
# `local_tokens_per_expert`, since core_v0.10.0).
_MODULE_BUFFER = re.compile(r"\.router\.(expert_bias|local_tokens_per_expert)$")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight and the offsets of its stored chunks, one tuple of distinct ascending offsets an axis."""

    tensor: LogicalTensor
    grid: tuple[tuple[int, ...], ...]


class LocalModels:
    """The local parameters of every (pipeline, tensor) rank of the job that wrote a checkpoint."""

    def __init__(
        self, weights: Mapping[str, StoredWeight], arguments: Mapping[str, Any], layout: ParallelLayout
    ) -> None:
        self.weights = {name: weight for name, weight in weights.items() if not _MODULE_BUFFER.search(name)}
        self.arguments = arguments
        self.layout = layout

    @property
    def ties_embeddings(self) -> bool:
        """Whether the output layer is the word embedding (`--untie-embeddings-and-output-weights` is off)."""
        return not self.arguments.get("untie_embeddings_and_output_weights", False)

    @cached_property
    def chunks(self) -> list[list[list[str]]] | None:
        """Names by `[pipeline rank][virtual stage]`; None where the pipeline split is not known.

        The last chunk of a tied model lists the word embeddings, too (language_module.py,
        `setup_embeddings_and_output_layer`).
        """
        layers = layers_by_chunk(self.arguments, self.layout)
        if layers is None:
            return None
        by_layer: dict[int | None, list[str]] = {}
        for name in self.weights:
            by_layer.setdefault(split_layer(name)[0], []).append(name)
        outside = by_layer.get(None, [])
        if any(name.startswith("mtp.") for name in outside):
            return None
        chunks = [[[n for i in span for n in by_layer.get(i, [])] for span in spans] for spans in layers]
        chunks[0][0] += [name for name in outside if name.startswith("embedding.")]
        chunks[-1][-1] += [name for name in outside if not name.startswith("embedding.")]
        if self.has_tied_copy:
            chunks[-1][-1].append(WORD_EMBEDDINGS)
        return chunks

    @property
    def has_tied_copy(self) -> bool:
        """Whether the last pipeline stage holds a copy of the word embeddings of its own."""
        return self.ties_embeddings and self.layout.pipeline > 1 and WORD_EMBEDDINGS in self.weights

    def pipeline_ranks_of(self, name: str) -> list[int]:
        """The pipeline ranks that can hold a parameter, the one to prefer first."""
        if self.chunks is None:
            return list(range(self.layout.pipeline))
        return [rank for rank, chunks in enumerate(self.chunks) if any(name in chunk for chunk in chunks)]

    def is_replicated(self, name: str) -> bool:
        """Whether every tensor-parallel rank holds the whole parameter."""
        return all(len(offsets) == 1 for offsets in self.weights[name].grid)

    def regions(self, name: str, tensor_rank: int) -> tuple[Region, ...] | None:
        """What one tensor-parallel rank holds of a parameter, in the order of its memory.

        One chunk a rank is a plain shard. Two chunks a rank, on the first axis, are a gated `linear_fc1`: the rank
        holds its rows of the gate, then its rows of the up projection (`apply_swiglu_sharded_factory`,
        megatron/core/transformer/mlp.py, core_v0.7.0 to 0.19.2).

        Returns:
            None where the stored chunks follow another pattern.
        """
        weight = self.weights[name]
        shape = weight.tensor.shape
        cut = [axis for axis, offsets in enumerate(weight.grid) if len(offsets) > 1]
        if not cut:
            return (Region.whole(name, shape),)
        axis, offsets = cut[0], weight.grid[cut[0]]
        parts, remainder = divmod(len(offsets), self.layout.tensor)
        if len(cut) > 1 or remainder or parts > 2 or (parts == 2 and axis != 0):
            return None
        ends = (*offsets[1:], shape[axis])
        chosen = range(tensor_rank, len(offsets), self.layout.tensor)
        return tuple(_band(name, shape, axis, offsets[index], ends[index]) for index in chosen)

    def candidates(self, tensor_rank: int, pipeline_rank: int) -> Iterable[tuple[str, tuple[Region, ...]]]:
        """All parameters that a rank can hold, with its regions."""
        for name in self.weights:
            regions = self.regions(name, tensor_rank)
            if regions is not None and pipeline_rank in self.pipeline_ranks_of(name):
                yield name, regions


def _band(name: str, shape: tuple[int, ...], axis: int, first: int, last: int) -> Region:
    offsets = tuple(first if position == axis else 0 for position in range(len(shape)))
    sizes = tuple(last - first if position == axis else size for position, size in enumerate(shape))
    return Region(name, offsets, sizes)
