"""The models of the self-test, and Megatron's command line for each under a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.selftest.jobs import LAST, SAVED, Machine

EXPERTS = 4
_LEAST_BATCHES = 4


@dataclass(frozen=True)
class Model:
    """Sizes of a model.

    Attributes:
        heads: number of attention heads, which is the largest possible number of tensor-parallel ranks.
        sequence: length of a sample.
        vocabulary: rows of the padded vocabulary.
        layers: number of layers; 0 means the machine's.
        samples: global batch size; 0 means a multiple of the number of ranks, which all data parallel sizes divide.
        at_once: micro batch size.
    """

    hidden: int = 128
    heads: int = 8
    sequence: int = 64
    vocabulary: int = 128
    layers: int = 0
    samples: int = 0
    at_once: int = 2


MODELS = {
    "gpt": Model(),
    "gpt in fp8": Model(),
    # Its matrices and samples consist of whole blocks of 128 x 128.
    "gpt in blockwise fp8": Model(hidden=256, sequence=128),
    "experts": Model(),
    # The model of the checkpoint in this package; another batch size would require a decision by the user.
    "tiny gpt": Model(hidden=16, heads=2, sequence=16, vocabulary=64, layers=2, samples=16, at_once=1),
}


def arguments(machine: Machine, model: str, layout: ParallelLayout) -> tuple[str, ...]:
    """Return Megatron's command line for a model under a layout.

    The padded vocabulary is the same under each.
    """
    sizes = MODELS[model]
    words = [word for name, value in _size_flags(machine, sizes, layout).items() for word in (f"--{name}", str(value))]
    # Kernels compiled by torch take longer than the self-test; Apex, which has others, may not be installed.
    words += ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion"]
    words += ["--no-bias-dropout-fusion", "--no-bias-swiglu-fusion", "--no-rope-fusion"]
    words += ["--bf16", "--use-distributed-optimizer", "--mock-data"]
    if layout.virtual_pipeline > 1:
        layers = (sizes.layers or machine.layers) // layout.pipeline // layout.virtual_pipeline
        words += ["--num-layers-per-virtual-pipeline-stage", str(layers)]
    if machine.no_engine:
        words += ["--transformer-impl", "local", "--attention-backend", "unfused", "--no-persist-layer-norm"]
    if model == "experts":
        words += ["--num-experts", str(EXPERTS), "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"]
        words += ["--expert-model-parallel-size", str(layout.expert), "--expert-tensor-parallel-size", "1"]
        words += ["--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"]
        words += ["--untie-embeddings-and-output-weights", "--position-embedding-type", "rope"]
        # Experts with tensor parallelism require it (megatron/training/arguments.py, validate_args).
        words += ["--sequence-parallel"] if layout.tensor > 1 else []
        words += [] if machine.no_engine else ["--moe-grouped-gemm"]
    return tuple(words)


def _size_flags(machine: Machine, sizes: Model, layout: ParallelLayout) -> Mapping[str, object]:
    return {
        "num-layers": sizes.layers or machine.layers,
        "hidden-size": sizes.hidden,
        "num-attention-heads": sizes.heads,
        "seq-length": sizes.sequence,
        "max-position-embeddings": sizes.sequence,
        "micro-batch-size": sizes.at_once,
        "global-batch-size": sizes.samples or sizes.at_once * machine.ranks * -(-_LEAST_BATCHES // machine.ranks),
        "lr": 3e-3,
        "min-lr": 3e-4,
        "lr-decay-iters": 100,
        "lr-warmup-iters": 1,
        "train-iters": LAST,
        "save-interval": SAVED,
        "eval-iters": 0,
        "eval-interval": 1000,
        "num-workers": 0,
        "log-interval": 1,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": sizes.vocabulary - 1,
        "make-vocab-size-divisible-by": sizes.vocabulary // layout.tensor,
        "ckpt-format": "torch_dist",
        "tensor-model-parallel-size": layout.tensor,
        "pipeline-model-parallel-size": layout.pipeline,
        "distributed-backend": machine.backend,
        "distributed-timeout-minutes": 3,
    }
