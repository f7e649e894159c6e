"""The parameters of each rank of the job that wrote a checkpoint, and the rank's part of each.

Both are derived from the stored weights, whose chunks are the tensor-parallel shards, and from the arguments.
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
from mcore_ckpt_ext.layout.weight_shards import Grid, ShardOfWeight, weight_shards
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
    grid: Grid


@dataclass(frozen=True, slots=True, order=True)
class ModelRank:
    """A rank's place in the model, as far as its parameters depend on it.

    Attributes:
        pipeline: the pipeline rank.
        tensor: the tensor-parallel rank; for experts, the expert-tensor-parallel rank.
        expert: the expert-parallel rank; None for parameters other than experts.
        shard: the rank's part of weights that generalized tensor parallelism divides further.
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
        """Keep the weights that gradient buffers can contain.

        Args:
            weights: the stored weights by name.
            arguments: the job's arguments.
            layout: the job's layout.
            has_expert_optimizer: whether experts have separate buffers and an optimizer of their own (expert
                parallelism).
            layers: global layers of the block that a pipeline divides, by `[pipeline rank][virtual stage]`; None to
                derive them from the arguments.
        """
        second = second_names(weights)
        self.weights = {
            name: weight for name, weight in weights.items() if not is_module_buffer(name) and name not in second
        }
        self.arguments = arguments
        self.layout = layout
        self.has_expert_optimizer = has_expert_optimizer
        self._layers = layers
        self._split_parameters = split_parameters(self.weights)
        # A parameter that is stored in parts has the name of its first part here; these are the others.
        self._first_part_of = {name: first for first, names in self._split_parameters.items() for name in names[1:]}
        self._expert_of = {name: expert for name in self.weights if (expert := parse(name).expert) is not None}

    def without(self, names: Collection[str]) -> LocalModels:
        """Return the same ranks without some parameters."""
        left = {name: weight for name, weight in self.weights.items() if name not in names}
        if len(left) == len(self.weights):
            return self
        return LocalModels(left, self.arguments, self.layout, self.has_expert_optimizer, self._layers)

    @property
    def mixes_experts(self) -> bool:
        """True if Megatron mixed parts of experts, or trained copies of them apart.

        See `ParallelLayout.divides_experts_alone`.
        """
        return self.layout.divides_experts_alone and not self.has_expert_optimizer and bool(self._expert_of)

    @property
    def ties_embeddings(self) -> bool:
        """True if the output layer is the word embedding (`--untie-embeddings-and-output-weights` is off)."""
        return not self.arguments.untie_embeddings_and_output_weights

    @cached_property
    def layers_by_chunk(self) -> list[list[range]] | None:
        """Global decoder layers by `[pipeline rank][virtual stage]`; None if the pipeline split is unknown."""
        return self._layers or layers_by_chunk(self.arguments, self.layout)

    @cached_property
    def predicts_more_tokens(self) -> bool:
        """True if there are layers for multi-token prediction."""
        return any(is_of_prediction(name) for name in self._parameters())

    @cached_property
    def chunks(self) -> list[list[list[str]]] | None:
        """Names by `[pipeline rank][virtual stage]`; None if the pipeline split is unknown.

        The word embeddings are also in the last chunk of a tied model (language_module.py,
        `setup_embeddings_and_output_layer`), and in the chunk with multi-token prediction (gpt_model.py,
        `if self.pre_process or self.mtp_process`, core_v0.14.0 to 0.19.2).
        """
        layers = self.layers_by_chunk
        if layers is None or self._is_divided_otherwise or self._has_unknown_prediction:
            return None
        chunks: list[list[list[str]]] = [[[] for _ in spans] for spans in layers]
        # Layers first, sorted by number; the order of the other parameters is that of registration.
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
        """The pipeline rank and virtual stage with multi-token prediction; None if none, or unknown."""
        return prediction_chunk(self.arguments, self.layout) if self.predicts_more_tokens else None

    @property
    def _has_unknown_prediction(self) -> bool:
        """True if multi-token prediction leaves `chunks` unknown.

        Either its chunk is unknown, or a buffer has an output layer that no checkpoint stores. The latter is the case
        in a tied model with multi-token prediction on its last stage: the output layer has a weight of its own, which
        is unused, because the copy of the embedding replaces it (`shared_embedding_or_output_weight`,
        language_module.py, and `skip_weight_param_allocation`, gpt_model.py, core_v0.14.0 to 0.19.2).
        """
        unknown = (None, self.layout.last_chunk) if self.has_tied_copy else (None,)
        return self.predicts_more_tokens and self._predicting_chunk in unknown

    def chunk_of(self, name: str) -> tuple[int, int] | None:
        """Return the pipeline rank and virtual stage of a tensor; None for a layer that no stage has.

        The language model ends with its norm and output layer. With multi-token prediction, its norm is on the stage of
        its last layer since 0.16 (`has_final_layernorm_in_this_stage`, transformer_block.py).
        """
        layer, _ = split_layer(name)
        if layer is not None and layer.block == self._pipelined_block:
            return self._chunk_of_layer.get(layer.number)
        suffix = name.removeprefix(self._prefix)
        if is_of_prediction(name):
            return self._predicting_chunk
        if (
            suffix.startswith(_FINAL_NORM)
            and self.predicts_more_tokens
            and FINAL_NORM_FOLLOWS_LAST_LAYER.is_shown_by(self.arguments)
        ):
            return self._chunk_of_layer.get(max(self._chunk_of_layer, default=0))
        return (0, 0) if layer is not None or precedes_layers(name, self._prefix) else self.layout.last_chunk

    @cached_property
    def _prefix(self) -> str:
        return language_prefix(self._pipelined_block or self.word_embeddings or "")

    @cached_property
    def _pipelined_block(self) -> str | None:
        return pipelined_block(self.weights)

    @cached_property
    def _chunk_of_layer(self) -> dict[int, tuple[int, int]]:
        spans = enumerate(self.layers_by_chunk or [])
        return {number: (rank, stage) for rank, stages in spans for stage, span in enumerate(stages) for number in span}

    @property
    def _is_divided_otherwise(self) -> bool:
        """True if stages divide the model in an unsupported way: two stacks of layers, or stages for a tower.

        T5 with several stages, and stages of an encoder (`--encoder-pipeline-model-parallel-size`), exist in
        core_v0.7.0 to 0.12.
        """
        if self.layout.pipeline == 1:
            return False
        return self._pipelined_block is None or bool(self.arguments.raw.get("encoder_pipeline_model_parallel_size"))

    @cached_property
    def word_embeddings(self) -> str | None:
        """The name of the word embeddings; None for a model without them."""
        return word_embeddings_in(self.weights)

    @property
    def has_tied_copy(self) -> bool:
        """True if the last pipeline stage has its own copy of the word embeddings."""
        return self.ties_embeddings and self.layout.pipeline > 1 and self.word_embeddings is not None

    def is_shared_embedding(self, name: str) -> bool:
        """Return whether a parameter is one of several copies of the word embeddings.

        Such copies get separate buckets.

        `shared_embedding` marks them on the first stage and on stages with a copy (language_module.py,
        `setup_embeddings_and_output_layer`, core_v0.7.0 to 0.19.2).
        """
        copied = self.has_tied_copy or (self.predicts_more_tokens and self.layout.pipeline > 1)
        return copied and name == self.word_embeddings

    def names(self, rank: ModelRank) -> list[list[str]] | None:
        """Return the names of a rank's parameters by virtual stage; None if the pipeline split is unknown."""
        if self.chunks is None:
            return None
        return [
            [name for name in chunk if self._expert_ranks.get(name) == rank.expert]
            for chunk in self.chunks[rank.pipeline]
        ]

    def _parameters(self) -> list[str]:
        return [name for name in self.weights if name not in self._first_part_of]

    def ranks_of(self, name: str) -> list[ModelRank]:
        """Return the ranks that can have a parameter, without replicas, the preferred one first."""
        expert = self._expert_ranks.get(name)
        whole = all(len(offsets) == 1 for offsets in self.weights[name].grid)
        tensor_ranks = range(1 if whole else self._tensor_ranks(name))
        shards = range(self.weight_shards if self._has_shards(name) else 1)
        return [
            ModelRank(stage, part, expert, shard)
            for stage in self._pipeline_ranks(name)
            for part in tensor_ranks
            for shard in shards
        ]

    @cached_property
    def weight_shards(self) -> int:
        """The number of parts of a tensor-parallel rank's weight under generalized tensor parallelism."""
        return weight_shards(self.arguments)

    def _has_shards(self, name: str) -> bool:
        """Return whether generalized tensor parallelism divides a parameter.

        It divides a matrix, by rows (`weight_shards.py`).
        """
        weight = self.weights[name]
        is_cut = len(weight.tensor.shape) > 1 and len(weight.grid[0]) > 1
        return self.weight_shards > 1 and is_cut and name not in self._expert_of

    def _pipeline_ranks(self, name: str) -> Iterable[int]:
        if self.chunks is None:
            return range(self.layout.pipeline)
        return self._pipeline_ranks_by_name.get(self._first_part_of.get(name, name), [])

    @cached_property
    def _pipeline_ranks_by_name(self) -> dict[str, list[int]]:
        stages: dict[str, list[int]] = {}
        for rank, chunks in enumerate(self.chunks or []):
            for name in dict.fromkeys(name for chunk in chunks for name in chunk):
                stages.setdefault(name, []).append(rank)
        return stages

    @cached_property
    def _expert_ranks(self) -> dict[str, int]:
        """Expert-parallel ranks by expert parameter; a rank has consecutive experts (moe/experts.py)."""
        if not self.has_expert_optimizer or not self._expert_of:
            return {}
        ranks = self.layout.expert
        experts = self.arguments.whole("num_experts")
        return {name: expert * ranks // experts for name, expert in self._expert_of.items()}

    def _tensor_ranks(self, name: str) -> int:
        return self.layout.expert_tensor if name in self._expert_of else self.layout.tensor

    def regions(self, name: str, tensor_rank: int, shard: int = 0) -> tuple[Region, ...] | None:
        """Return one tensor-parallel rank's part, in the order of its memory.

        For experts, it is the part of an expert-tensor-parallel rank. If a parameter is stored in parts, `name` is that
        of the first part, and the result includes all parts. `shard`: the same as in `ModelRank`.

        Returns:
            None if the stored chunks have an unknown pattern.
        """
        parts = [self._part_regions(part, tensor_rank, shard) for part in self._split_parameters.get(name, [name])]
        known_parts = [part for part in parts if part is not None]
        return tuple(chain.from_iterable(known_parts)) if len(known_parts) == len(parts) else None

    def _part_regions(self, name: str, tensor_rank: int, shard: int) -> tuple[Region, ...] | None:
        """Return the regions of one stored array; None if the stored chunks have an unknown pattern.

        One chunk per rank is a plain shard. Two chunks per rank, on the first axis, are a gated `linear_fc1`: the rank
        has its rows of the gate, then its rows of the up projection (`apply_swiglu_sharded_factory`,
        megatron/core/transformer/mlp.py, core_v0.7.0 to 0.19.2).
        """
        weight = self.weights[name]
        ranks = self._tensor_ranks(name)
        shape = weight.tensor.shape
        if self._has_shards(name):
            return ShardOfWeight(tensor_rank, ranks, shard, self.weight_shards).regions(name, shape, weight.grid)
        cut = [axis for axis, offsets in enumerate(weight.grid) if len(offsets) > 1]
        if not cut:
            return (Region.whole(name, shape),)
        axis = cut[0]
        offsets = weight.grid[cut[0]]
        parts, remainder = divmod(len(offsets), ranks)
        if len(cut) > 1 or remainder or parts > 2 or (parts == 2 and axis != 0):
            return None
        ends = (*offsets[1:], shape[axis])
        chosen = range(tensor_rank, len(offsets), ranks)
        return tuple(Region.band(name, shape, axis, offsets[index], ends[index]) for index in chosen)

    def candidates(self, rank: ModelRank) -> Iterable[tuple[str, tuple[Region, ...]]]:
        """Yield all parameters that a rank can have, with the rank's regions of each."""
        for name in self._parameters():
            if self._expert_ranks.get(name) == rank.expert and rank.pipeline in self._pipeline_ranks(name):
                regions = self.regions(name, rank.tensor, rank.shard)
                if regions is not None:
                    yield name, regions
