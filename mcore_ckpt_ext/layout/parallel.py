"""Parallel layouts, and the decoder layers of each pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.job.arguments.kinds import MOST_RANKS
from mcore_ckpt_ext.job.dimensions import (
    DIMENSIONS,
    LABELS,
    MODEL_SIZE_ARGUMENTS,
    OF_MODEL,
    SIZE_ARGUMENTS,
    SPLIT_ARGUMENTS,
    format_sizes,
)
from mcore_ckpt_ext.job.hybrid_pattern import is_hybrid, layer_pattern
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import FILTERS_ARE_FIRST
from mcore_ckpt_ext.layout.grad_buffer import default_bucket_size
from mcore_ckpt_ext.layout.stage_layout import StageLayout
from mcore_ckpt_ext.layout.weight_shards import WEIGHT_SHARDS

# Many times the largest known job. Larger sizes come from damaged arguments, and would be iterated rank by rank.
_MOST_OF_A_MODEL = 1 << 14


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the parallel dimensions of a job.

    `virtual_pipeline` is the number of model chunks per pipeline rank.

    `unknown`: names of dimensions whose size is unknown. Where a size is required, 1 is tried, and verified by the
    master check. It is never displayed.
    """

    tensor: int
    pipeline: int
    virtual_pipeline: int
    expert: int
    expert_tensor: int
    context: int
    data: int
    world: int
    unknown: frozenset[str] = frozenset()

    @classmethod
    def from_arguments(cls, arguments: JobArguments) -> ParallelLayout:
        """Read Megatron's parsed arguments (`megatron/training/arguments.py`, `validate_args`, 0.7 to 0.19).

        Megatron's `data_parallel_size` does not include the context-parallel ranks.

        Raises:
            UnreadableCheckpointError: no job can have these sizes.
        """
        tensor = arguments.tensor_model_parallel_size or 1
        pipeline = arguments.pipeline_model_parallel_size or 1
        context = arguments.context_parallel_size or 1
        data = arguments.data_parallel_size or 1
        layout = cls(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=(arguments.virtual_pipeline_model_parallel_size or 1) if pipeline > 1 else 1,
            expert=arguments.expert_model_parallel_size or 1,
            expert_tensor=(arguments.expert_tensor_parallel_size if arguments.num_experts else None) or tensor,
            context=context,
            data=data,
            world=arguments.world_size or tensor * pipeline * context * data,
            unknown=_unknown(arguments),
        )
        sizes = layout.sizes()
        largest = max(tensor * pipeline, layout.expert_tensor * layout.expert, pipeline * layout.virtual_pipeline)
        if layout.world > MOST_RANKS or largest > _MOST_OF_A_MODEL:
            raise UnreadableCheckpointError("the arguments of the job name an impossible layout", found=sizes)
        return layout

    @property
    def expert_data(self) -> int:
        """The number of data-parallel ranks of experts, with world size = ETP x EP x PP x this number.

        Source: the expert rank generator of `initialize_model_parallel` (megatron/core/parallel_state.py, core_v0.12.0
        to 0.19.2).
        """
        return self.world // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def last_chunk(self) -> tuple[int, int]:
        """The pipeline rank and virtual stage of the last model chunk."""
        return self.pipeline - 1, self.virtual_pipeline - 1

    @property
    def separates_experts(self) -> bool:
        """True if experts have gradient buffers, data-parallel ranks and an optimizer of their own.

        Source: `use_expert_pgs` (megatron/core/tensor_parallel/layers.py and extensions/transformer_engine.py,
        core_v0.19.0 to 0.19.2); before, with expert parallelism alone (`allreduce`, core_v0.7.0 to 0.18.2).
        """
        return self.expert > 1 or self.divides_experts_alone

    @property
    def divides_experts_alone(self) -> bool:
        """True if ETP is not TP, without expert parallelism.

        Up to core_v0.18.2, the gradients of such experts are reduced with all others, among ranks that have other parts
        of them, or not among those that have the same (`allreduce`, core_v0.7.0 to 0.18.2; see `separates_experts`).
        """
        return self.expert == 1 and self.expert_tensor != self.tensor

    def sizes(self) -> dict[str, int]:
        """Return the size of each dimension by name; 1 for unknown ones."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "unknown"}

    def model_sizes(self) -> dict[str, int]:
        """Return the size of each dimension that divides the model, by name; 1 for unknown ones."""
        return {dimension.name: getattr(self, dimension.name) for dimension in OF_MODEL}

    def known_sizes(self) -> dict[str, int | None]:
        """Return the size of each dimension by name; None for unknown ones."""
        return {name: None if name in self.unknown else size for name, size in self.sizes().items()}

    def __str__(self) -> str:
        parts = format_sizes({name: size for name, size in self.known_sizes().items() if size is not None})
        missing = [label for name, label in LABELS.items() if name in self.unknown and name != "expert_tensor"]
        if not parts:
            return "not known"
        return parts + (f" ({', '.join(missing)} not known)" if missing else "")


def _unknown(arguments: JobArguments) -> frozenset[str]:
    """Return the dimensions of unknown size; none for Megatron's arguments, where missing means 1."""
    if arguments.is_complete:
        return frozenset()
    is_single_stage = arguments.pipeline_model_parallel_size == 1
    has_no_experts = arguments.is_set("num_experts") and not arguments.num_experts
    not_needed = {dimension.name for dimension in DIMENSIONS if dimension.is_of_experts and has_no_experts}
    size_is_known = {
        name: name in not_needed or arguments.raw.get(argument) is not None for name, argument in SIZE_ARGUMENTS.items()
    }
    # Megatron stores None for one stage.
    size_is_known["virtual_pipeline"] = arguments.is_set(SIZE_ARGUMENTS["virtual_pipeline"]) or is_single_stage
    return frozenset(name for name, is_known in size_is_known.items() if not is_known)


def has_varying_layers(arguments: JobArguments) -> bool:
    """Return whether a model's layers are configured one by one, so that some may have no parameters.

    Source: `HeterogeneousTransformerConfig` (megatron/core/transformer/heterogeneous, core_v0.12 to 0.19.2).
    """
    return bool(arguments.heterogeneous_layers_config_path or arguments.heterogeneous_layers_config_encoded_json)


def layers_by_chunk(arguments: JobArguments, layout: ParallelLayout) -> list[list[range]] | None:
    """Return global decoder layers of every model chunk by `[pipeline rank][virtual stage]`.

    Rules: `get_transformer_layer_offset` (megatron/core/transformer/transformer_layer.py) and
    `get_num_layers_to_build` (transformer_block.py), the same in core_v0.8.0 to 0.19.2, except for
    `--pipeline-model-parallel-layout` (`stage_layout`), which replaces all other rules since 0.13.

    Returns:
        None for layouts outside these rules.
    """
    virtual = layout.virtual_pipeline
    if arguments.pipeline_model_parallel_layout:
        stage_layout = StageLayout.parse(arguments.pipeline_model_parallel_layout)
        if stage_layout is None or len(stage_layout.stages) != layout.pipeline * virtual:
            return None
        stages = stage_layout.layers(layout.pipeline)
        return stages if stages[-1][-1].stop == arguments.num_layers else None
    counts = _layers_per_stage(arguments, layout.pipeline)
    if (segments := _hybrid_segments(arguments)) and len(segments) == layout.pipeline * virtual:
        ends = [0, *accumulate(segments)]
        spans = [range(*span) for span in zip(ends, ends[1:], strict=False)]
        return [spans[rank :: layout.pipeline] for rank in range(layout.pipeline)]
    if counts is None or any(count % virtual for count in counts):
        return None
    chunks: list[list[range]] = [[] for _ in counts]
    following = 0
    for stage in range(virtual):
        for rank, count in enumerate(counts):
            built = count // virtual
            if rank == 0 and stage == 0 and arguments.account_for_embedding_in_pipeline_split:
                built -= 1
            if rank == len(counts) - 1 and stage == virtual - 1:
                built -= bool(arguments.account_for_loss_in_pipeline_split)
            chunks[rank].append(range(following, following + built))
            following += built
    return chunks if following == arguments.num_layers else None


def _hybrid_segments(arguments: JobArguments) -> list[int]:
    """Return the layers of each pipeline segment in a hybrid model's pattern, for example `M*M-|M*M-`.

    Source: megatron/core/models/hybrid/hybrid_layer_allocation.py (core_v0.17.0 to 0.19.2).

    Returns:
        Empty if the pattern has no segments.
    """
    segments = layer_pattern(arguments).split("|")
    return [len(segment) for segment in segments] if len(segments) > 1 else []


def _layers_per_stage(arguments: JobArguments, pipeline: int) -> list[int] | None:
    """Return each pipeline rank's layers over all its chunks, with embedding and loss if they count."""
    total = arguments.num_layers
    if total is None:
        return None
    first = arguments.decoder_first_pipeline_num_layers
    last = arguments.decoder_last_pipeline_num_layers
    if first is None and last is None:
        total += bool(arguments.account_for_embedding_in_pipeline_split)
        total += bool(arguments.account_for_loss_in_pipeline_split)
        return None if total % pipeline else [total // pipeline] * pipeline
    middle = pipeline - (first is not None) - (last is not None)
    left = total - (first or 0) - (last or 0)
    if middle < 0 or (middle and left % middle):
        return None
    head = [first] if first is not None else []
    tail = [last] if last is not None else []
    return head + [left // middle if middle else 0] * middle + tail


def prediction_chunk(arguments: JobArguments, layout: ParallelLayout) -> tuple[int, int] | None:
    """Return the pipeline rank and virtual stage of all layers for multi-token prediction.

    Rules: `get_mtp_num_layers_to_build` and `mtp_on_this_rank` (megatron/core/transformer/multi_token_prediction.py,
    core_v0.14.0 to 0.19.2): the last stage, or the stage named in the layout of stages.

    Returns:
        None if unknown.
    """
    if not arguments.pipeline_model_parallel_layout:
        return layout.last_chunk
    stage_layout = StageLayout.parse(arguments.pipeline_model_parallel_layout)
    return None if stage_layout is None else stage_layout.prediction_chunk(layout.pipeline)


# The arguments that determine the positions of parameters in the gradient buffers of a rank: the parallel layout, the
# division into buckets (distributed_data_parallel.py), and the order in which modules register their parameters.
_PLACING_ARGUMENTS = (
    *(name for name in MODEL_SIZE_ARGUMENTS if name != SIZE_ARGUMENTS["context"]),
    *SPLIT_ARGUMENTS,
    "overlap_grad_reduce",
    "ddp_bucket_size",
    "ddp_num_buckets",
    "ddp_pad_buckets_for_high_nccl_busbw",
    "overlap_param_gather_with_optimizer_step",
    "accumulate_allreduce_grads_in_fp32",
    "fp8_param_gather",
    "fp4_param_gather",
    "transformer_impl",
    "moe_grouped_gemm",
    "untie_embeddings_and_output_weights",
    "padded_vocab_size",
    "moe_use_legacy_grouped_gemm",
    "spec",
)
SWITCHES = ("mla_down_proj_fusion", "moe_single_grouped_weight", "moe_single_grouped_bias")
"""Model settings that also affect these positions; off if a version, or the source of the arguments, lacks them."""


def placement_changes(written: JobArguments, running: JobArguments) -> list[str]:
    """Return the arguments that make two jobs' gradient buffers differ; empty if the buffers are equal.

    An argument that does not exist in one of the versions counts as unchanged.
    """
    changes = [
        name
        for name in _PLACING_ARGUMENTS
        if written.is_set(name)
        and running.is_set(name)
        and str(written.value(name) or 0) != str(running.value(name) or 0)
    ]
    jobs = (written, running)
    changes += [name for name in SWITCHES if len({bool(job.raw.get(name)) for job in jobs}) > 1]
    changes += [name for name in WEIGHT_SHARDS if len({str(job.raw.get(name) or 1) for job in jobs}) > 1]
    layouts = [ParallelLayout.from_arguments(job) for job in jobs]
    if all(map(is_hybrid, jobs)):
        stages = [layers_by_chunk(job, layout) for job, layout in zip(jobs, layouts, strict=True)]
        changes += ["hybrid_layer_pattern"] if stages[0] != stages[1] else []
        filters_first = {FILTERS_ARE_FIRST.is_shown_by(job) for job in jobs}
        changes += ["the order of a Mamba mixer's parameters"] if len(filters_first) > 1 else []
    # The default bucket size depends on the number of data-parallel ranks.
    if running.overlap_grad_reduce and not (running.ddp_bucket_size or running.ddp_num_buckets):
        sizes = {default_bucket_size(layout.data * layout.context) for layout in layouts}
        changes += ["data_parallel_size"] if len(sizes) > 1 else []
    return changes
