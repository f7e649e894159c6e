"""The parameters of one rank of the job that wrote a checkpoint, and its part of each.

Everything follows from the stored weights, whose chunks are the tensor-parallel shards, and from the arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter

from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import FINAL_NORM_FOLLOWS_LAST_LAYER
from mcore_ckpt_ext.layout.parallel import ParallelLayout, layers_by_chunk, prediction_chunk
from mcore_ckpt_ext.layout.weight_shards import ShardOfWeight, band, weight_shards
from mcore_ckpt_ext.model_space.anatomy import (
    is_of_prediction,
    language_prefix,
    pipelined_block,
    precedes_layers,
    second_names,
    word_embeddings_in,
)
from mcore_ckpt_ext.model_space.names import is_module_buffer, parse, split_layer, split_parameters
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.model_space.tensors import LogicalTensor

_FINAL_NORM = "decoder.final_layernorm."


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight and the offsets of its stored chunks, one tuple of distinct ascending offsets per axis."""

    tensor: LogicalTensor
    grid: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, order=True)
class ModelRank:
    """A rank's place in the model, as far as its parameters depend on it.

    `expert` is None for everything but experts, and `tensor` the tensor-parallel rank; for the experts of one
    expert-parallel rank, `tensor` is the expert-tensor-parallel rank. `shard`: which part it holds of weights that
    generalized tensor parallelism cuts once more.
    """

    pipeline: int
    tensor: int
    expert: int | None = None
    shard: int = 0

    def __str__(self) -> str:
        expert = "" if self.expert is None else f", expert rank {self.expert}"
        shard = f", weight shard {self.shard}" if self.shard else ""
        return f"tensor rank {self.tensor}, pipeline rank {self.pipeline}{expert}{shard}"


class LocalModels:
    """The local parameters of every rank of the job that wrote a checkpoint."""

    def __init__(
        self,
        weights: Mapping[str, StoredWeight],
        arguments: JobArguments,
        layout: ParallelLayout,
        has_expert_optimizer: bool,
        layers: list[list[range]] | None = None,
    ) -> None:
        """`has_expert_optimizer`: experts have buffers and an optimizer of their own (several expert-parallel ranks).

        `layers`: global layers of the block that a pipeline divides, by `[pipeline rank][virtual stage]`; None to take
        them from the arguments.
        """
        twice = second_names(weights)
        self.weights = {
            name: weight for name, weight in weights.items() if not is_module_buffer(name) and name not in twice
        }
        self.arguments = arguments
        self.layout = layout
        self.has_expert_optimizer = has_expert_optimizer
        self._layers = layers
        self._parts = split_parameters(self.weights)
        # Split parameters go by their first part; these are the others.
        self._first_of = {name: first for first, names in self._parts.items() for name in names[1:]}
        self._expert_of = {name: expert for name in self.weights if (expert := parse(name).expert) is not None}

    def without(self, names: Collection[str]) -> LocalModels:
        """The same ranks, as if they did not hold some parameters."""
        left = {name: weight for name, weight in self.weights.items() if name not in names}
        if len(left) == len(self.weights):
            return self
        return LocalModels(left, self.arguments, self.layout, self.has_expert_optimizer, self._layers)

    @property
    def ties_embeddings(self) -> bool:
        """Whether the output layer is the word embedding (`--untie-embeddings-and-output-weights` is off)."""
        return not self.arguments.untie_embeddings_and_output_weights

    @cached_property
    def layers_by_chunk(self) -> list[list[range]] | None:
        """Global decoder layers by `[pipeline rank][virtual stage]`; None where the pipeline split is not known."""
        return self._layers or layers_by_chunk(self.arguments, self.layout)

    @cached_property
    def predicts_more_tokens(self) -> bool:
        """Whether there are layers of multi-token prediction."""
        return any(is_of_prediction(name) for name in self._parameters())

    @cached_property
    def chunks(self) -> list[list[list[str]]] | None:
        """Names by `[pipeline rank][virtual stage]`; None where the pipeline split is not known.

        The last chunk of a tied model lists the word embeddings, too (language_module.py,
        `setup_embeddings_and_output_layer`), as does the one that predicts further tokens (gpt_model.py,
        `if self.pre_process or self.mtp_process`, core_v0.14.0 to 0.19.2).
        """
        layers = self.layers_by_chunk
        if layers is None or self._is_divided_otherwise or self._has_idle_output_layer:
            return None
        chunks: list[list[list[str]]] = [[[] for _ in spans] for spans in layers]
        # The layers first, as their numbers are; what stands around them has its place in the order of registration.
        parameters = [(split_layer(name)[0], name) for name in self._parameters()]
        inside = sorted(((layer.number, name) for layer, name in parameters if layer is not None), key=itemgetter(0))
        for name in [*(name for _, name in inside), *(name for layer, name in parameters if layer is None)]:
            if (place := self.chunk_of(name)) is not None:
                chunks[place[0]][place[1]].append(name)
        if self.word_embeddings is not None and self.has_tied_copy:
            chunks[-1][-1].append(self.word_embeddings)
        if self.word_embeddings is not None and (copy := self._predicting_chunk) not in (None, (0, 0)):
            chunks[copy[0]][copy[1]].append(self.word_embeddings)
        return chunks

    @cached_property
    def _predicting_chunk(self) -> tuple[int, int] | None:
        """The pipeline rank and virtual stage that predict further tokens; None where none does, or it is not known."""
        return prediction_chunk(self.arguments, self.layout) if self.predicts_more_tokens else None

    @property
    def _has_idle_output_layer(self) -> bool:
        """Whether the place of prediction is not known, or a buffer holds an output layer that no checkpoint stores.

        So it is in a tied model whose last stage predicts: its output layer has a weight of its own, which is not used,
        for the copy of the embedding stands in for it (`shared_embedding_or_output_weight`, language_module.py, and
        `skip_weight_param_allocation`, gpt_model.py, core_v0.14.0 to 0.19.2).
        """
        if not self.predicts_more_tokens:
            return False
        last = (self.layout.pipeline - 1, self.layout.virtual_pipeline - 1)
        return self._predicting_chunk is None or (self.has_tied_copy and self._predicting_chunk == last)

    def chunk_of(self, name: str) -> tuple[int, int] | None:
        """The pipeline rank and virtual stage that hold a tensor; None of a layer that no stage has.

        The language model ends with its norm and output layer. Where it predicts further tokens, its norm follows its
        last layer since 0.16 (`has_final_layernorm_in_this_stage`, transformer_block.py).
        """
        layer, _ = split_layer(name)
        if layer is not None and layer.block == self._divided:
            return self._chunk_of_layer.get(layer.number)
        own = name.removeprefix(self._prefix)
        if is_of_prediction(name):
            return self._predicting_chunk
        if (
            own.startswith(_FINAL_NORM)
            and self.predicts_more_tokens
            and FINAL_NORM_FOLLOWS_LAST_LAYER.is_shown_by(self.arguments)
        ):
            return self._chunk_of_layer.get(max(self._chunk_of_layer, default=0))
        last = (self.layout.pipeline - 1, self.layout.virtual_pipeline - 1)
        return (0, 0) if layer is not None or precedes_layers(name, self._prefix) else last

    @cached_property
    def _prefix(self) -> str:
        return language_prefix(self._divided or self.word_embeddings or "")

    @cached_property
    def _divided(self) -> str | None:
        return pipelined_block(self.weights)

    @cached_property
    def _chunk_of_layer(self) -> dict[int, tuple[int, int]]:
        spans = enumerate(self.layers_by_chunk or [])
        return {number: (rank, stage) for rank, own in spans for stage, span in enumerate(own) for number in span}

    @property
    def _is_divided_otherwise(self) -> bool:
        """Whether stages hold the model in a way that is not known here: two stacks of layers, stages for a tower.

        T5 with several stages, and those of an encoder (`--encoder-pipeline-model-parallel-size`), are of
        core_v0.7.0 to 0.12.
        """
        if self.layout.pipeline == 1:
            return False
        return self._divided is None or bool(self.arguments.raw.get("encoder_pipeline_model_parallel_size"))

    @cached_property
    def word_embeddings(self) -> str | None:
        """The name of the word embeddings; None of a model without them."""
        return word_embeddings_in(self.weights)

    @property
    def has_tied_copy(self) -> bool:
        """Whether the last pipeline stage holds a copy of the word embeddings of its own."""
        return self.ties_embeddings and self.layout.pipeline > 1 and self.word_embeddings is not None

    def is_shared_embedding(self, name: str) -> bool:
        """Whether a parameter is one of several copies of the word embeddings, which get buckets of their own.

        `shared_embedding` marks them on the first stage and on those with a copy (language_module.py,
        `setup_embeddings_and_output_layer`, core_v0.7.0 to 0.19.2).
        """
        copied = self.has_tied_copy or (self.predicts_more_tokens and self.layout.pipeline > 1)
        return copied and name == self.word_embeddings

    def names(self, rank: ModelRank) -> list[list[str]] | None:
        """Names that a rank holds, by virtual stage; None where the pipeline split is not known."""
        if self.chunks is None:
            return None
        return [
            [name for name in chunk if self._expert_ranks.get(name) == rank.expert]
            for chunk in self.chunks[rank.pipeline]
        ]

    def _parameters(self) -> list[str]:
        return [name for name in self.weights if name not in self._first_of]

    def ranks_of(self, name: str) -> list[ModelRank]:
        """The ranks that can hold a parameter, the preferred one first; replicas are left out."""
        expert = self._expert_ranks.get(name)
        whole = all(len(offsets) == 1 for offsets in self.weights[name].grid)
        tensor_ranks = range(1 if whole else self._tensor_size(name))
        shards = range(self.weight_shards if self._is_sharded(name) else 1)
        return [
            ModelRank(stage, part, expert, shard)
            for stage in self._pipeline_ranks(name)
            for part in tensor_ranks
            for shard in shards
        ]

    @cached_property
    def weight_shards(self) -> int:
        """Into how many parts generalized tensor parallelism cuts what a tensor-parallel rank holds of a weight."""
        return weight_shards(self.arguments)

    def _is_sharded(self, name: str) -> bool:
        """Whether generalized tensor parallelism cuts a parameter: a matrix, along its rows (`weight_shards.py`)."""
        weight = self.weights[name]
        is_cut = len(weight.tensor.shape) > 1 and len(weight.grid[0]) > 1
        return self.weight_shards > 1 and is_cut and name not in self._expert_of

    def _pipeline_ranks(self, name: str) -> Iterable[int]:
        if self.chunks is None:
            return range(self.layout.pipeline)
        return self._stages.get(self._first_of.get(name, name), [])

    @cached_property
    def _stages(self) -> dict[str, list[int]]:
        stages: dict[str, list[int]] = {}
        for rank, chunks in enumerate(self.chunks or []):
            for name in dict.fromkeys(name for chunk in chunks for name in chunk):
                stages.setdefault(name, []).append(rank)
        return stages

    @cached_property
    def _expert_ranks(self) -> dict[str, int]:
        """The expert-parallel rank of each expert's parameter: consecutive experts lie together (moe/experts.py)."""
        if not self.has_expert_optimizer or not self._expert_of:
            return {}
        ranks, experts = self.layout.expert, self.arguments.whole("num_experts")
        return {name: expert * ranks // experts for name, expert in self._expert_of.items()}

    def _tensor_size(self, name: str) -> int:
        return self.layout.expert_tensor if name in self._expert_of else self.layout.tensor

    def regions(self, name: str, tensor_rank: int, shard: int = 0) -> tuple[Region, ...] | None:
        """The part of one tensor-parallel rank (expert-tensor-parallel for experts), in the order of its memory.

        These are all parts, where a parameter is stored in parts and `name` is that of the first one. `shard`: as in
        `ModelRank`.

        Returns:
            None where the stored chunks follow another pattern.
        """
        parts = [
            self._regions_of_shard(part, tensor_rank, shard)
            if self._is_sharded(part)
            else self._part_regions(part, tensor_rank)
            for part in self._parts.get(name, [name])
        ]
        known = [part for part in parts if part is not None]
        return tuple(chain.from_iterable(known)) if len(known) == len(parts) else None

    def _regions_of_shard(self, name: str, tensor_rank: int, shard: int) -> tuple[Region, ...] | None:
        weight = self.weights[name]
        part = ShardOfWeight(tensor_rank, self._tensor_size(name), shard, self.weight_shards)
        return part.regions(name, weight.tensor.shape, weight.grid)

    def _part_regions(self, name: str, tensor_rank: int) -> tuple[Region, ...] | None:
        """The regions of one stored array.

        One chunk per rank is a plain shard. Two chunks per rank, on the first axis, are a gated `linear_fc1`: the rank
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
        ranks = self._tensor_size(name)
        parts, remainder = divmod(len(offsets), ranks)
        if len(cut) > 1 or remainder or parts > 2 or (parts == 2 and axis != 0):
            return None
        ends = (*offsets[1:], shape[axis])
        chosen = range(tensor_rank, len(offsets), ranks)
        return tuple(band(name, shape, axis, offsets[index], ends[index]) for index in chosen)

    def candidates(self, rank: ModelRank) -> Iterable[tuple[str, tuple[Region, ...]]]:
        """All parameters that a rank can hold, with the rank's regions of each."""
        for name in self._parameters():
            if self._expert_ranks.get(name) == rank.expert and rank.pipeline in self._pipeline_ranks(name):
                regions = self.regions(name, rank.tensor, rank.shard)
                if regions is not None:
                    yield name, regions
