"""The division of a model's layers among pipeline stages, and the flags for Megatron that produce it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from mcore_ckpt_ext.job.dimensions import SPLIT_ARGUMENTS
from mcore_ckpt_ext.job.hybrid_pattern import is_hybrid
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.job.releases import TAKES_STAGE_LAYOUTS
from mcore_ckpt_ext.layout.parallel import ParallelLayout, layers_by_chunk
from mcore_ckpt_ext.versions import Version


@dataclass(frozen=True)
class StageSplit:
    """One way to divide the decoder layers among the pipeline stages.

    Attributes:
        layers: number of decoder layers by `[pipeline rank][virtual stage]`.
        arguments: the values of Megatron's arguments that produce it, other than pipeline sizes; all arguments that
            affect the split are included, so that none of the old layout remains by accident.
    """

    layers: tuple[tuple[int, ...], ...]
    arguments: tuple[tuple[str, Any], ...]

    @cached_property
    def largest(self) -> int:
        """The largest number of decoder layers of a pipeline rank."""
        return max(map(sum, self.layers))

    @cached_property
    def ranges(self) -> Sequence[Sequence[range]]:
        """Global decoder layers by `[pipeline rank][virtual stage]`, in Megatron's interleaved order."""
        ranges: list[list[range]] = [[] for _ in self.layers]
        following = 0
        for stage in range(len(self.layers[0])):
            for rank, counts in enumerate(self.layers):
                ranges[rank].append(range(following, following + counts[stage]))
                following += counts[stage]
        return ranges


def stage_splits(job: JobArguments, pipeline: int, virtual: int, version: Version) -> Iterator[StageSplit]:
    """Yield divisions of the layers among `pipeline` ranks of `virtual` stages each, the simplest first.

    The job's own flags are kept for its own number of stages. Otherwise an even split needs no flag. If there is none,
    the job's own flags may divide the layers, or the last stage, or the first and the last one, may have fewer layers
    (`--decoder-last-pipeline-num-layers`, `--decoder-first-pipeline-num-layers`). If that fails, a layout string names
    every stage.

    Args:
        job: arguments of the model.
        pipeline: pipeline parallel size.
        virtual: model chunks per pipeline rank.
        version: the Megatron release that would run.
    """
    total = job.num_layers
    if total is None:
        return
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for arguments in _candidates(job, total, pipeline, virtual, version):
        split = applied_split(job, arguments, pipeline, virtual)
        if split is not None and split.layers not in seen:
            seen.add(split.layers)
            yield split


def _candidates(
    job: JobArguments, total: int, pipeline: int, virtual: int, version: Version
) -> Iterator[dict[str, Any]]:
    """Yield values of the arguments that divide the layers; Megatron may refuse them."""
    if is_hybrid(job):
        # A pattern may name its segments; `layers_by_chunk` checks whether they fit.
        yield {name: job.value(name) for name in SPLIT_ARGUMENTS if not name.startswith("account_for")}
        return
    split_arguments = {name: job.value(name) for name in SPLIT_ARGUMENTS}
    old = ParallelLayout.from_arguments(job)
    text = split_arguments["pipeline_model_parallel_layout"]
    has_own = any(split_arguments.values()) and (text is None or isinstance(text, str))
    if has_own and (old.pipeline, old.virtual_pipeline) == (pipeline, virtual):
        yield split_arguments
    accounted = {name: bool(job.value(name)) for name in SPLIT_ARGUMENTS if name.startswith("account_for")}
    if any(accounted.values()):
        yield accounted
    yield {}
    if has_own:
        yield split_arguments
    share = -(-total // pipeline)
    # Virtual stages share the layers of each stage equally.
    for full in dict.fromkeys((share, -(-share // virtual) * virtual)):
        last = total - full * (pipeline - 1)
        if pipeline > 1 and 0 < last < full:
            yield {"decoder_last_pipeline_num_layers": last}
        ends = total - full * (pipeline - 2)
        first = -(-ends // (2 * virtual)) * virtual
        if pipeline > 2 and first < ends < 2 * full:
            yield {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": ends - first}
    if TAKES_STAGE_LAYOUTS.is_of(version) and 2 * total >= pipeline * virtual - 2 and pipeline > 1:
        counts = _balance(total, pipeline * virtual)
        yield {"pipeline_model_parallel_layout": layout_string(counts, job.mtp_num_layers or 0)}


def _balance(total: int, stages: int) -> list[int]:
    """Return the most even numbers of layers.

    The stages with the embedding and the loss are the first to get fewer.
    """
    least, more = divmod(total, stages)
    counts = [least] * stages
    middle_first = [*range(1, stages - 1), 0, stages - 1]
    for stage in middle_first[:more]:
        counts[stage] += 1
    return counts


def layout_string(counts: list[int], predicted: int = 0) -> str:
    """Return the `--pipeline-model-parallel-layout` for stages with these numbers of decoder layers.

    `E` is the embedding, `t` a decoder layer, `m` a layer for multi-token prediction, `L` the loss; `|` separates
    stages, and `(tt|)*3` repeats (`PipelineParallelLayerLayout.parse_str_to_list`,
    megatron/core/transformer/pipeline_parallel_layer_layout.py, core_v0.13.0 to 0.19.2).
    """
    stages = ["t" * count for count in counts]
    stages[0] = f"E{stages[0]}"
    stages[-1] += "m" * predicted + "L"
    runs = [(stage, len(list(run))) for stage, run in groupby(stages[:-1])]
    parts = [f"({stage}|)*{count}" if count > 1 and stage else f"{stage}|" * count for stage, count in runs]
    return "".join([*parts, stages[-1]])


def applied_split(job: JobArguments, arguments: Mapping[str, Any], pipeline: int, virtual: int) -> StageSplit | None:
    """Return the split that Megatron derives from these arguments.

    Returns:
        None if Megatron refuses them, or for a layout string that `layout_string` does not produce.
    """
    chosen = {name: arguments.get(name) for name in SPLIT_ARGUMENTS}
    items = tuple(chosen.items())
    text = chosen["pipeline_model_parallel_layout"]
    if text and text != job.pipeline_model_parallel_layout and not is_hybrid(job):
        counts = _balance(job.num_layers or 0, pipeline * virtual)
        if layout_string(counts, job.mtp_num_layers or 0) != text:
            return None
        return StageSplit(tuple(tuple(counts[rank::pipeline]) for rank in range(pipeline)), items)
    layout = replace(ParallelLayout.from_arguments(job), pipeline=pipeline, virtual_pipeline=virtual)
    chunks = layers_by_chunk(job.replace(**chosen), layout)
    if chunks is None or any(span.stop < span.start for rank in chunks for span in rank):
        return None
    layers = tuple(tuple(map(len, rank)) for rank in chunks)
    # With an explicit first or last stage, no stage may be without layers (`TransformerConfig`), and virtual stages
    # need a stage between the two (`get_transformer_layer_offset`, transformer_layer.py, divides by their number).
    ends = sum(chosen[f"decoder_{end}_pipeline_num_layers"] is not None for end in ("first", "last"))
    if ends and (not all(map(sum, layers)) or (virtual > 1 and pipeline == ends)):
        return None
    return StageSplit(layers, items)
