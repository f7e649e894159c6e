"""Computes a GPU's memory under a layout: states exactly, everything else as an estimate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import ceil

from mcore_ckpt_ext.layout.grad_buffer import align, bucket_alignment
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.choice import Choice
from mcore_ckpt_ext.layout_choice.layer_wise import LayerWise
from mcore_ckpt_ext.layout_choice.model_table import Holding, StageHolding
from mcore_ckpt_ext.layout_choice.stage_activations import StageActivations

_MIB = 1 << 20
CONTEXT = 1024 * _MIB
"""A constant: the CUDA context with the kernels of torch, Transformer Engine and NCCL, and workspaces of cuBLAS."""
COMMUNICATOR = 256 * _MIB
"""A constant for each group of ranks that communicates: the buffers of NCCL's channels (NCCL_BUFFSIZE, 4 MiB each)."""

MOST_CACHED = 4096 * _MIB
"""A constant: free parts of the segments of torch's allocator, which is smaller in small jobs. In 15 published pairs of
allocated and reserved memory of 16 to 120 billion parameters it is 2.4 to 12.3 GiB, with a median of 4.1 GiB."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest GPU at its peak, and in the memory of its host.

    Attributes:
        weights: weights, from their shapes.
        gradients: gradient buffers, from the shapes.
        optimizer: masters and moments on the GPU, from the shapes.
        activations: what micro batches in flight keep for their backward passes; an estimate.
        host: optimizer state in host memory.
        backward: what one layer's backward pass holds: recomputed activations and gradients; an estimate.
        loss: logits and softmax; an estimate.
        step: copies of gradients or moments in fp32, made in the optimizer's step; an estimate.
        context: the CUDA context and NCCL's buffers; a constant.
        received: what pipeline stages keep of the last micro batch between two steps; see `StageActivations`.
        loading: copies that Megatron makes while it loads a checkpoint, of all weights that are stored in bands: after
            all of them are read, it joins gate and up projection, and the state dict holds the results until the model
            has taken them (`apply_swiglu_sharded_factory`, megatron/core/transformer/mlp.py, and
            `apply_factory_merges`, dist_checkpointing/mapping.py). They do not count as needed: where there is no
            room, they are made on the host (`sh_ten_merge_fn`, core_v0.16.1; `cat_with_oom_fallback`,
            transformer/utils.py, core_v0.19.2).
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    host: int = 0
    backward: int = 0
    loss: int = 0
    step: int = 0
    context: int = 0
    received: int = 0
    loading: int = 0

    @property
    def static(self) -> int:
        """Bytes of weights, gradients and optimizer, which do not depend on the batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def needed(self) -> int:
        """The peak of training: in the loss, a layer's backward pass, or the optimizer's step."""
        return self.static + max(self.activations + max(self.backward, self.loss), self.received + self.step)

    @property
    def allocated(self) -> int:
        """The peak of what torch allocates, in training or, if there is room, while a checkpoint is loaded."""
        return max(self.needed, self.static + self.loading)

    @property
    def reserved(self) -> int:
        """The peak of what torch reserves; it returns what is not allocated before memory runs out."""
        return self.allocated + min(self.allocated // 10, MOST_CACHED)

    @property
    def total(self) -> int:
        """All memory on the GPU that training needs."""
        return self.needed + self.context


class Sharding(Enum):
    """The states that data-parallel ranks share besides the optimizer's, by Megatron-FSDP's strategy."""

    OPTIMIZER = "optim"
    GRADIENTS = "optim_grads"
    PARAMETERS = "optim_grads_params"


@dataclass(frozen=True, slots=True)
class Buffers:
    """How a job stores its weights, its gradients and its optimizer.

    Attributes:
        gradient_bytes: bytes of one element (4 with `--accumulate-allreduce-grads-in-fp32`).
        is_distributed: whether parameters are in buffers that are padded for the data-parallel ranks.
        high_bandwidth: `--ddp-pad-buckets-for-high-nccl-busbw`.
        offloaded: the fraction of the optimizer in host memory (`--optimizer-offload-fraction`).
        kept_on_device: bytes of an element that stay on the GPU although they are offloaded: the fp32 masters of
            `DistributedOptimizer`, of which `HybridDeviceOptimizer` has copies on the host
            (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, core_v0.12.0 to 0.19.2).
        layer_wise: how a layer-wise optimizer distributes whole parameters; None for other optimizers.
        quantized_bytes: bytes of an element of a weight in fp8, kept in addition to the weight in bf16.
        step_bytes: bytes of an element of fp32 copies in the optimizer's step, of all its parts at once.
        step_bytes_in_turn: the same, of one part of the optimizer at a time.
        sharding: what ranks share.
    """

    gradient_bytes: int
    is_distributed: bool = True
    high_bandwidth: bool = False
    offloaded: float = 0.0
    layer_wise: LayerWise | None = None
    kept_on_device: int = 0
    quantized_bytes: float = 0.0
    step_bytes: int = 0
    step_bytes_in_turn: int = 0
    sharding: Sharding = Sharding.OPTIMIZER


def memory_of(stage: StageHolding, choice: Choice, buffers: Buffers, activations: StageActivations) -> Memory:
    """Return the memory of one rank of a pipeline stage.

    A gradient buffer, and with a distributed optimizer the buffer of weights, is padded at its end for the ranks that
    share it. Each bucket of `--overlap-grad-reduce` adds less than one such padding, which is ignored.
    """
    layout = choice.layout
    shares = ((stage.dense, choice.optimizer_ranks), (stage.experts, choice.expert_optimizer_ranks))
    weights = gradients = optimizer = host = gathered = 0
    steps = []
    for holding, ranks in shares:
        if not holding.elements:
            continue
        padded = _padded_size(holding, ranks, buffers)
        has_shards = buffers.sharding is Sharding.PARAMETERS
        trained = max(holding.trained, 1)
        padding = holding.weight_bytes * (padded - holding.trained) // holding.elements
        weight = holding.weight_bytes + padding + round(buffers.quantized_bytes * holding.elements)
        gradient = padded * buffers.gradient_bytes
        weights += weight // ranks if has_shards else weight
        gradients += gradient // ranks if buffers.sharding is not Sharding.OPTIMIZER else gradient
        gathered += weight + gradient if has_shards else 0
        is_shared = has_shards or holding.shared_state > 0
        whole = holding.whole_state // ranks if has_shards else holding.whole_state
        state = ceil(holding.shared_state * padded / trained / ranks) + whole
        held_elements = padded // ranks if is_shared else padded
        moved = round(state * buffers.offloaded)
        host += moved
        optimizer += state - moved + round(min(held_elements * buffers.kept_on_device, state) * buffers.offloaded)
        steps.append(held_elements)
    layers = choice.split.largest if choice.split else 1
    # Megatron-FSDP gathers a layer while the next one is in use.
    temporary = 2 * gathered // max(layers, 1)
    loading = sum(holding.joined_weights for holding, _ in shares) if not gathered else 0
    step = buffers.step_bytes * sum(steps) + buffers.step_bytes_in_turn * max(steps, default=0)
    return Memory(
        weights,
        gradients,
        optimizer,
        activations.kept,
        host,
        backward=activations.backward + temporary,
        loss=activations.loss + temporary,
        step=round(step * (1 - buffers.offloaded)),
        context=context_of(layout),
        received=activations.received,
        loading=loading,
    )


def context_of(layout: ParallelLayout) -> int:
    """Return the bytes outside torch's allocator: constants for the process and each communicator."""
    groups = (
        layout.tensor,
        layout.pipeline,
        layout.context,
        layout.data * layout.context,
        layout.expert,
        layout.expert_data if layout.separates_experts else 1,
    )
    return CONTEXT + COMMUNICATOR * sum(size > 1 for size in groups)


def _padded_size(holding: Holding, ranks: int, buffers: Buffers) -> int:
    if not buffers.is_distributed:
        return holding.trained
    return align(holding.aligned, bucket_alignment(ranks, buffers.high_bandwidth))
