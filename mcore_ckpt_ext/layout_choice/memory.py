"""Computes a GPU's memory under a layout: activations as an estimate, everything else exactly.

Weights, gradients and optimizer states are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mcore_ckpt_ext.layout.grad_buffer import align, bucket_alignment
from mcore_ckpt_ext.layout_choice.layer_wise import LayerWise
from mcore_ckpt_ext.layout_choice.model_table import Holding, StageHolding
from mcore_ckpt_ext.layout_choice.options import Recomputation
from mcore_ckpt_ext.layout_choice.rules import Choice


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest GPU, and in the memory of its host.

    `weights`, `gradients` and `optimizer` follow from the shapes; `activations` is an estimate.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    host: int = 0

    @property
    def static(self) -> int:
        """Bytes of weights, gradients and optimizer, which do not depend on the batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All memory on the GPU."""
        return self.static + self.activations


@dataclass(frozen=True, slots=True)
class Buffers:
    """How a job stores its gradients and its optimizer.

    Attributes:
        gradient_bytes: bytes of one element (4 with `--accumulate-allreduce-grads-in-fp32`).
        is_distributed: whether parameters are in buffers that are padded for the data-parallel ranks.
        high_bandwidth: `--ddp-pad-buckets-for-high-nccl-busbw`.
        offloaded: the fraction of the optimizer in host memory (`--optimizer-offload-fraction`).
        layer_wise: how a layer-wise optimizer distributes whole parameters; None for other optimizers.
    """

    gradient_bytes: int
    is_distributed: bool = True
    high_bandwidth: bool = False
    offloaded: float = 0.0
    layer_wise: LayerWise | None = None


def memory_of(stage: StageHolding, choice: Choice, buffers: Buffers, activations: int) -> Memory:
    """Return the memory of one rank of a pipeline stage.

    A gradient buffer, and with a distributed optimizer the buffer of weights, is padded at its end for the ranks that
    share it. Each bucket of `--overlap-grad-reduce` adds less than one such padding, which is ignored.
    """
    layout = choice.layout
    shares = ((stage.dense, layout.data * layout.context), (stage.experts, layout.expert_data))
    weights = gradients = optimizer = 0
    for holding, ranks in shares:
        if not holding.elements:
            continue
        padded = _padded(holding, ranks, buffers)
        weights += holding.weight_bytes * padded // holding.elements
        gradients += padded * buffers.gradient_bytes
        optimizer += ceil(holding.shared_state * padded / holding.elements / ranks) + holding.whole_state
    host = round(optimizer * buffers.offloaded)
    return Memory(weights, gradients, optimizer - host, activations, host)


def _padded(holding: Holding, ranks: int, buffers: Buffers) -> int:
    if not buffers.is_distributed:
        return holding.elements
    return align(holding.aligned, bucket_alignment(ranks, buffers.high_bandwidth))


def activation_bytes(choice: Choice, recomputation: Recomputation) -> int:
    """Estimate the activations on the first pipeline stage, in bytes of bf16 training.

    Formulas: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198),
    sections 4 and 5, as megatron/training/theoretical_memory_usage.py applies them (core_v0.12.0 to 0.19.2). With
    selective recomputation, a layer keeps `s b h (10 + 24 / TP)` bytes without sequence parallelism, and
    `s b h (18 + 4 ffn / h) / TP` with it. With full recomputation it keeps only its input, `2 s b h`. Without any,
    attention adds `5 a s^2 b / TP`. Pipelines keep the activations of several micro batches at once.
    """
    job, layout = choice.job, choice.layout
    hidden, length = job.hidden_size or 0, (job.seq_length or 0) // layout.context
    tokens = length * choice.micro_batch
    is_divided = choice.has_sequence_parallelism
    share = layout.tensor if is_divided or layout.tensor == 1 else 1
    if recomputation is Recomputation.FULL:
        layer = 2.0 * tokens * hidden / share
    elif share == layout.tensor:
        layer = tokens * hidden * (18 + 4 * (job.ffn_hidden_size or 4 * hidden) / max(hidden, 1)) / share
    else:
        layer = tokens * hidden * (10 + 24 / layout.tensor)
    if recomputation is Recomputation.NONE:
        layer += 5.0 * (job.num_attention_heads or 0) * length * tokens / layout.tensor
    layers = choice.split.largest if choice.split else 0
    held = layer * layers * _batches_in_flight(choice)
    held += (8 * tokens + tokens * hidden) * layout.pipeline / share
    if layout.pipeline == 1:
        held += 4 * tokens * (hidden + (job.padded_vocab_size or 0)) / layout.tensor
    return ceil(held)


def _batches_in_flight(choice: Choice) -> float:
    """Return how many micro batches of activations the first stage keeps.

    Returns:
        A fraction if only some layers keep one.
    """
    layout = choice.layout
    if layout.virtual_pipeline > 1:
        return layout.pipeline * (1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual_pipeline))
    return min(layout.pipeline, max(choice.microbatches, 1))


def bubble_fraction(choice: Choice) -> float:
    """Return a pipeline's idle time relative to its busy time: `(PP - 1) / (VPP x micro batches)`.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
    (arXiv:2104.04473), section 2.2.
    """
    layout = choice.layout
    work = layout.virtual_pipeline * max(choice.microbatches, 1)
    return (layout.pipeline - 1) / (work + layout.pipeline - 1)
