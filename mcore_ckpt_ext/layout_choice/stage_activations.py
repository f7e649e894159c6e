"""Estimates the activations of each pipeline stage: layers, recomputation, schedule and loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.activation_options import ActivationOptions
from mcore_ckpt_ext.layout_choice.activations import LayerTerms, Shares, terms_of
from mcore_ckpt_ext.layout_choice.choice import Choice
from mcore_ckpt_ext.layout_choice.model_sizes import ModelSizes, Part
from mcore_ckpt_ext.layout_choice.options import Recomputation


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes of activations on a rank of a pipeline stage.

    Attributes:
        kept: what all micro batches in flight keep for their backward passes.
        backward: what the backward pass of one layer holds besides that: recomputed activations and gradients.
        loss: the logits and the softmax of the last stage.
        received: what stays of the last micro batch while nothing runs: for each model chunk that gets its input from
            another stage, this input and its gradient (`set_input_tensor`,
            megatron/core/transformer/transformer_block.py, and `retain_grad` in
            pipeline_parallel/schedules.py, core_v0.12.0 to 0.19.2). The next micro batch replaces it.
    """

    kept: int
    backward: int
    loss: int
    received: int = 0


def chunks_in_flight(layout: ParallelLayout, rank: int, microbatches: int, group: int) -> tuple[int, ...]:
    """Return how many micro batches of each model chunk wait for their backward pass at the peak.

    Source: `get_pp_rank_microbatches` and `get_schedule_table` (megatron/core/pipeline_parallel/schedules.py,
    core_v0.9.0 to 0.19.2): a rank runs a number of forward passes, and then one forward and one backward pass in turn.
    Chunks alternate after each group of micro batches. Narayanan et al. (arXiv:2104.04473), section 2.2.

    Args:
        layout: the parallel sizes.
        rank: the pipeline rank.
        microbatches: micro batches of an iteration.
        group: `--microbatch-group-size-per-virtual-pipeline-stage`; by default the pipeline size.
    """
    stages = layout.pipeline
    chunks = layout.virtual_pipeline
    if chunks == 1:
        return (min(stages - rank, microbatches),)
    passes = min(2 * (stages - rank - 1) + (chunks - 1) * group + 1, microbatches * chunks)
    rounds, rest = divmod(passes, group * chunks)
    return tuple(rounds * group + min(max(rest - chunk * group, 0), group) for chunk in range(chunks))


class ActivationEstimate:
    """Estimates the activations of layouts of one model; what layouts have in common is computed once."""

    def __init__(self, job: JobArguments, recomputation: Recomputation) -> None:
        self._sizes = ModelSizes.of(job)
        self._options = ActivationOptions.of(job, recomputation)
        self._logit_bytes = _loss_bytes(job)
        self._terms = cache(self._terms_of)
        self._kept = cache(self._kept_by_chunk)
        self._backward = cache(self._held_by_backward)

    def stages(self, choice: Choice) -> Iterator[StageActivations]:
        """Yield the activations of each pipeline stage of a layout."""
        layout = choice.layout
        split = choice.split
        if split is None:
            return
        shares = _shares_of(choice)
        terms = self._terms(shares)
        last = layout.pipeline - 1
        for rank, spans in enumerate(split.ranges):
            flying = chunks_in_flight(layout, rank, max(choice.microbatches, 1), choice.microbatch_group)
            kept = sum(count * self._kept(span, shares) for count, span in zip(flying, spans, strict=True))
            kept += flying[0] * self._embedding_activations(shares) if rank == 0 else 0
            loss = 0.0
            if rank == last:
                kept += flying[-1] * self._predicted_layer_activations(terms)
                held, loss = self._loss_activations(choice, shares)
                kept += held
            received = (len(spans) - (rank == 0)) * 2 * 2 * shares.tokens * self._sizes.hidden / shares.residual
            yield StageActivations(
                ceil(kept), ceil(max(self._backward(span, shares) for span in spans)), ceil(loss), ceil(received)
            )

    def _terms_of(self, shares: Shares) -> dict[Part, LayerTerms]:
        parts = {part for layer in self._sizes.layers for part in layer} | {Part.ATTENTION, Part.FEED_FORWARD}
        return {part: terms_of(part, self._sizes, self._options, shares) for part in parts}

    def _kept_by_chunk(self, span: range, shares: Shares) -> float:
        """Return what the layers of a model chunk keep for one micro batch."""
        options = self._options
        start = span.start
        inputs = 0.0
        if options.offloaded_layers:
            # `--cpu-offloading-num-layers` moves what the first layers keep to the host; it needs one pipeline stage.
            start = min(start + options.offloaded_layers, span.stop)
        elif options.recomputation is Recomputation.FULL:
            # `TransformerBlock._checkpointed_forward`: `uniform` keeps the input of every group of layers, `block` that
            # of each of the first layers of a chunk, and everything of the others.
            is_block = options.method == "block"
            start = min(span.start + options.period, span.stop) if is_block else span.stop
            saved = start - span.start if is_block else ceil(len(span) / options.period)
            ranks = shares.tensor if options.distributes else shares.residual
            inputs = saved * 2 * shares.tokens * self._sizes.hidden / ranks
        terms = self._terms(shares)
        counted = Counter(part for layer in self._sizes.layers[start : span.stop] for part in layer)
        return inputs + sum(count * terms[part].kept for part, count in counted.items())

    def _held_by_backward(self, span: range, shares: Shares) -> float:
        """Return what the backward pass of one layer, or of one recomputed group of layers, holds."""
        layers = set(self._sizes.layers[span.start : span.stop])
        terms = self._terms(shares)
        options = self._options
        is_full = options.recomputation is Recomputation.FULL
        period = options.period if is_full and options.method != "block" else 1
        needs = [
            period * sum(terms[part].whole if is_full else 0.0 for part in layer)
            + max((terms[part].gradient + (0.0 if is_full else terms[part].recomputed) for part in layer), default=0.0)
            for layer in layers
        ]
        return max(needs, default=0.0)

    def _embedding_activations(self, shares: Shares) -> float:
        """Token numbers, and the mask of the embedding's dropout; its output is the input of the first layer."""
        mask = shares.tokens * self._sizes.hidden / shares.residual if self._options.has_dropout else 0.0
        return 8 * shares.tokens + mask

    def _predicted_layer_activations(self, terms: dict[Part, LayerTerms]) -> float:
        """Multi-token prediction: each depth is a layer as the last one, and the projection before it.

        Source: `MultiTokenPredictionLayer` (megatron/core/transformer/multi_token_prediction.py).
        """
        if not self._sizes.predicted or not self._sizes.layers:
            return 0.0
        projection = 3 * terms[Part.ATTENTION].terms["residual input"]
        parts = self._sizes.layers[-1]
        if len(parts) == 1:  # a hybrid model predicts with attention and experts or an MLP
            parts = (Part.ATTENTION, Part.EXPERTS if Part.EXPERTS in terms else Part.FEED_FORWARD)
        return self._sizes.predicted * (projection + sum(terms[part].kept for part in parts))

    def _loss_activations(self, choice: Choice, shares: Shares) -> tuple[float, float]:
        """Return the bytes that the loss keeps, and those that it needs at its peak.

        Each depth of multi-token prediction has logits of its own, whose softmax stays until its backward pass.
        """
        rows = choice.table.padded_rows(shares.tensor)
        logits = shares.tokens * rows / shares.tensor
        stream = 2 * 2 * shares.tokens * self._sizes.hidden / shares.residual
        held, peak = self._logit_bytes
        depths = self._sizes.predicted
        return stream * (1 + depths) + held * logits * depths, peak * logits


def _loss_bytes(job: JobArguments) -> tuple[int, int]:
    """Return the bytes of a logit that stay for the backward pass, and at the peak.

    Logits in bf16 are cast to fp32, and the softmax of the loss replaces the copy in place: 2 + 4
    (`_VocabParallelCrossEntropy`, megatron/core/tensor_parallel/cross_entropy.py, core_v0.7.0 to 0.19.2). With
    `--cross-entropy-loss-fusion` the compiled gradient is a second tensor in fp32, and a third one in bf16: 4 + 4 + 2
    (`calculate_gradients`, fusions/fused_cross_entropy.py). Transformer Engine's loss computes the gradient in the
    forward pass, next to the logits, and keeps it in fp32 since release 2.18: 2 + 4 (`cross_entropy_forward`,
    transformer_engine/pytorch/triton/cross_entropy.py; up to 2.17 in place of the logits, with less memory).
    """
    is_native = job.raw.get("cross_entropy_loss_fusion") and job.raw.get("cross_entropy_fusion_impl") != "te"
    return (4, 10) if is_native else (4, 6)


def _shares_of(choice: Choice) -> Shares:
    layout = choice.layout
    return Shares(
        length=-(-(choice.job.seq_length or 0) // layout.context),
        samples=choice.micro_batch,
        tensor=layout.tensor,
        expert_tensor=layout.expert_tensor,
        residual=layout.tensor if choice.has_sequence_parallelism else 1,
        expert=layout.expert,
    )


def recomputation_of(job: JobArguments, wanted: str | None) -> Recomputation:
    """Return the recomputation that is wanted, or that of the job.

    Raises:
        UsageError: its name is unknown.
    """
    text = wanted or job.raw.get("recompute_granularity") or "none"
    try:
        return Recomputation(text)
    except ValueError:
        raise UsageError(
            "unknown activation recomputation",
            found=str(text)[:40],
            expected=", ".join(recomputation.value for recomputation in Recomputation),
        ) from None
