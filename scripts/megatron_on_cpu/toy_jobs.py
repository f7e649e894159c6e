"""Command lines of toy training jobs for ``pretrain_gpt.py`` and ``train_gpt.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def _words(arguments: str) -> tuple[str, ...]:
    return tuple(arguments.split())


CPU = _words(
    "--distributed-backend gloo --transformer-impl local --attention-backend unfused --num-workers 0"
    " --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-bias-gelu-fusion"
    " --no-bias-dropout-fusion --no-bias-swiglu-fusion --no-rope-fusion"
)
"""Arguments of every job on CPU ranks: no NCCL, no Transformer Engine, no fused kernels."""

GPU = ("--distributed-backend", "nccl", *CPU[2:])
"""Arguments of jobs on GPUs: the local spec, which allows the small parameters of the tests' checkpoints."""

TINY_GPT = _words(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 100 --lr-warmup-iters 2"
    " --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 99,1,0 --eval-iters 0 --eval-interval 1000"
    " --attention-dropout 0 --hidden-dropout 0 --log-interval 1"
)
"""A small GPT-2-like model with four layers."""

LLAMA = _words(
    "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 2"
    " --untie-embeddings-and-output-weights --disable-bias-linear"
)
"""Arguments that turn the tiny GPT into a Llama-like model."""

ASYNCHRONOUS_SAVE = ("--async-save", "--use-persistent-ckpt-worker")
"""Arguments for saving in a persistent background process (0.19 also needs ``--async-strategy mcore``)."""


def tiny_gpt(
    tensor_parallel: int,
    pipeline_parallel: int,
    *,
    iterations: int,
    save: Path | str | None = None,
    save_interval: int = 4,
    load: Path | str | None = None,
    precision: Sequence[str] = ("--bf16",),
    optimizer: Sequence[str] = ("--use-distributed-optimizer",),
    more: Sequence[str] = (),
    devices: Sequence[str] = CPU,
) -> list[str]:
    """Return the arguments of a job that saves and loads torch_dist checkpoints; `devices`: `CPU` or `GPU`."""
    arguments = [*devices, *TINY_GPT, *precision, *optimizer, "--ckpt-format", "torch_dist"]
    arguments += ["--tensor-model-parallel-size", str(tensor_parallel)]
    arguments += ["--pipeline-model-parallel-size", str(pipeline_parallel)]
    arguments += ["--train-iters", str(iterations)]
    if save is not None:
        arguments += ["--save", str(save), "--save-interval", str(save_interval)]
    if load is not None:
        arguments += ["--load", str(load)]
    return [*arguments, *more]
