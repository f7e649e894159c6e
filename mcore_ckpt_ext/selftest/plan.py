"""Which jobs the self-test runs on a machine: pure data, made from what the machine has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcore_ckpt_ext.selftest.jobs import LAST, SAVED, Job, Layout

HEADS = LAYERS = 8
HIDDEN, SEQUENCE, VOCABULARY = 128, 64, 128
_EXPERTS = 4
_MOST_LAYOUTS = 9
_RESUMED = "optimizer resumed from"
_FAST = "--ckpt-ext-load: "
DP_RESHARDABLE, FULLY_RESHARDABLE = "dp_reshardable", "fully_reshardable"


@dataclass(frozen=True)
class Machine:
    """What the self-test has to work with.

    Attributes:
        ranks: number of ranks.
        backend: of torch.distributed.
        no_engine: why there are no layers of Transformer Engine; empty where there are.
        no_fp8: why nothing is computed in fp8; empty where it can be.
        layers: number of layers of the models, the most pipeline stages that there can be.
    """

    ranks: int
    backend: str = "nccl"
    no_engine: str = ""
    no_fp8: str = ""
    layers: int = LAYERS


def plan(machine: Machine) -> tuple[Job, ...]:
    """Return the jobs in the order in which they run; each follows the one whose checkpoint it resumes."""
    return (*_dense(machine), *_fully_reshardable(machine), *_experts(machine), *_engine(machine))


def layouts(ranks: int, layers: int) -> list[Layout]:
    """Return the layouts of so many ranks that the models allow, with the least tensor parallelism first."""
    sizes = [1, 2, 4, 8]
    return [
        Layout(ranks, tensor, pipeline)
        for tensor in sizes
        for pipeline in sizes
        if tensor <= HEADS and pipeline <= layers and ranks % (tensor * pipeline) == 0
    ]


def _source(found: Sequence[Layout]) -> Layout:
    """Return the layout that saves: cut in every dimension if there are ranks enough, else into stages."""
    return max(found, key=lambda one: (one.tensor <= 2 and one.pipeline <= 2, one.pipeline, one.tensor))


def _dense(machine: Machine) -> Iterator[Job]:
    found = layouts(machine.ranks, machine.layers)
    source = _source(found)
    others = [layout for layout in found if layout != source][:_MOST_LAYOUTS]
    save = _saving(machine, "gpt", source, DP_RESHARDABLE, ("--async-save",), check="save, asynchronously")
    yield save
    for layout in others:
        yield _resuming(machine, save, layout, expects=_RESUMED)
    fast = ("--ckpt-ext-load", "fast")
    yield _resuming(machine, save, source, *fast, check="resume, fast load", expects=_FAST)
    once = ("--ckpt-ext-read-once",)
    layout = max(others, key=lambda one: one.data, default=source)
    yield _resuming(
        machine, save, layout, *once, check="resume, read once", expects=_RESUMED,
        skipped="" if layout.data > 1 else "no two ranks read the same: data parallelism needs 2 GPUs",
    )  # fmt: skip


def _fully_reshardable(machine: Machine) -> Iterator[Job]:
    found = layouts(machine.ranks, machine.layers)
    source = _source(found)
    flags = ("--dist-ckpt-optim-fully-reshardable",)
    save = _saving(machine, "gpt", source, FULLY_RESHARDABLE, flags, check="save")
    yield save
    yield _resuming(machine, save, max(found, key=lambda one: (one != source, one.tensor)), *flags)


def _experts(machine: Machine) -> Iterator[Job]:
    ranks, expert = machine.ranks, min(_EXPERTS, machine.ranks)
    source = Layout(ranks, 1, 1, max(size for size in (1, 2, 4) if size <= expert and ranks % size == 0))
    save = _saving(machine, "experts", source, DP_RESHARDABLE, ("--async-save",), check="save, asynchronously")
    yield save
    found = [Layout(ranks, 1, 2), Layout(ranks, 2, 1), Layout(ranks, 2, 2, 2), Layout(ranks, 1, 1)]
    for layout in dict.fromkeys(found):
        if layout != source and ranks % (layout.tensor * layout.pipeline * layout.expert) == 0:
            yield _resuming(machine, save, layout, expects=_RESUMED)
    if ranks == 1:
        yield _resuming(machine, save, source)


def _engine(machine: Machine) -> Iterator[Job]:
    """Computing in fp8, by Transformer Engine."""
    found = layouts(machine.ranks, machine.layers)
    source, flags = _source(found), ("--fp8-format", "hybrid", "--fp8-recipe", "delayed")
    why_not = machine.no_engine or machine.no_fp8
    save = _saving(machine, "gpt in fp8", source, DP_RESHARDABLE, flags, check="save", skipped=why_not)
    yield save
    target = max(found, key=lambda one: (one != source, one.data))
    expects = _RESUMED if target != source else ""
    yield _resuming(machine, save, target, *flags, expects=expects, skipped=why_not)


def _saving(
    machine: Machine, model: str, layout: Layout, kind: str, flags: Sequence[str], *, check: str, skipped: str = ""
) -> Job:
    return Job(
        name=f"{model}-{kind}".replace(" ", "-"),
        model=model,
        format=kind,
        layout=layout,
        check=check,
        arguments=(*arguments(machine, model, layout), *flags),
        skipped=skipped,
    )


def _resuming(
    machine: Machine, save: Job, layout: Layout, *flags: str, check: str = "resume", expects: str = "",
    skipped: str = "",
) -> Job:  # fmt: skip
    return Job(
        name=f"{save.name}-{layout}-{check}".replace(",", "").replace(" ", "-").lower(),
        model=save.model,
        format=save.format,
        layout=layout,
        check=check,
        arguments=(*arguments(machine, save.model, layout), *flags),
        loads=save.name,
        expects=expects,
        skipped=skipped,
    )


def arguments(machine: Machine, model: str, layout: Layout) -> tuple[str, ...]:
    """Return Megatron's command line for a model under a layout; the padded vocabulary is the same under each."""
    named = {
        "num-layers": machine.layers, "hidden-size": HIDDEN, "num-attention-heads": HEADS, "seq-length": SEQUENCE,
        "max-position-embeddings": SEQUENCE, "micro-batch-size": 1, "global-batch-size": 2 * max(4, machine.ranks),
        "lr": 3e-3, "min-lr": 3e-4, "lr-decay-iters": 100, "lr-warmup-iters": 1, "train-iters": LAST,
        "save-interval": SAVED, "eval-iters": 0, "eval-interval": 1000, "num-workers": 0, "log-interval": 1,
        "attention-dropout": 0, "hidden-dropout": 0, "tokenizer-type": "NullTokenizer", "vocab-size": VOCABULARY - 1,
        "make-vocab-size-divisible-by": VOCABULARY // layout.tensor, "ckpt-format": "torch_dist",
        "tensor-model-parallel-size": layout.tensor, "pipeline-model-parallel-size": layout.pipeline,
        "distributed-backend": machine.backend, "distributed-timeout-minutes": 3,
    }  # fmt: skip
    # Kernels that torch compiles take longer than the self-test; Apex, of which others are, need not be installed.
    unfused = ("gradient-accumulation", "masked-softmax", "bias-gelu", "bias-dropout", "bias-swiglu", "rope")
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    words += ["--bf16", "--use-distributed-optimizer", "--mock-data", *(f"--no-{name}-fusion" for name in unfused)]
    if machine.no_engine:
        words += ["--transformer-impl", "local", "--attention-backend", "unfused", "--no-persist-layer-norm"]
    if model == "experts":
        words += ["--num-experts", str(_EXPERTS), "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"]
        words += ["--expert-model-parallel-size", str(layout.expert), "--expert-tensor-parallel-size", "1"]
        words += ["--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"]
        words += ["--untie-embeddings-and-output-weights", "--position-embedding-type", "rope"]
        # Experts and tensor parallelism need it together (megatron/training/arguments.py, validate_args).
        words += ["--sequence-parallel"] if layout.tensor > 1 else []
        words += [] if machine.no_engine else ["--moe-grouped-gemm"]
    return tuple(words)
