"""Models beyond the plain GPT, saved and resumed by genuine Megatron-LM 0.19.2 under other layouts.

The live optimizer right after the resume equals the one that was saved, element for element.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.megatron import assemble, launch, train

GATED = ["--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"]
GATED += ["--untie-embeddings-and-output-weights"]
EXPERTS = [*GATED, "--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"]
SHARED = ["--moe-shared-expert-intermediate-size", "32", "--moe-layer-freq", "[0,1,1,1]"]
BIAS = ["--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"]
LATENT = [*GATED, "--multi-latent-attention", "--q-lora-rank", "16", "--kv-lora-rank", "16", "--qk-head-dim", "8"]
LATENT += ["--qk-pos-emb-head-dim", "8", "--v-head-dim", "8", "--qk-layernorm"]
UNEVEN = ["--decoder-first-pipeline-num-layers", "1"]
BUCKETS = ["--overlap-grad-reduce", "--ddp-bucket-size", "3000"]


@dataclass(frozen=True)
class Layout:
    """Ranks, tensor and pipeline parallel size, and the arguments that belong to the layout."""

    ranks: int
    tensor: int
    pipeline: int
    more: tuple[str, ...] = ()


def experts_over(ranks: int, tensor: int, pipeline: int, expert: int) -> Layout:
    """With tensor parallelism experts need sequence parallelism (megatron/training/arguments.py)."""
    sequence = ("--sequence-parallel",) if tensor > 1 else ()
    sizes = ("--expert-model-parallel-size", str(expert), "--expert-tensor-parallel-size", "1")
    return Layout(ranks, tensor, pipeline, (*sequence, *sizes))


CASES = {
    "experts": (
        EXPERTS,
        experts_over(8, 2, 2, 2),
        [experts_over(8, 1, 2, 4), experts_over(4, 1, 4, 1), experts_over(4, 2, 1, 1)],
    ),
    "shared experts, layer frequency, expert bias": (
        [*EXPERTS, *SHARED, *BIAS],
        experts_over(4, 1, 2, 2),
        [experts_over(4, 1, 1, 4), experts_over(2, 2, 1, 1)],
    ),
    "latent attention": (LATENT, Layout(4, 2, 2), [Layout(4, 1, 4), Layout(2, 1, 1)]),
    "uneven pipeline, to even and interleaved": (
        GATED,
        Layout(4, 1, 2, tuple(UNEVEN)),
        [Layout(4, 2, 2), Layout(4, 1, 2, ("--num-layers-per-virtual-pipeline-stage", "1"))],
    ),
    "several buckets": ([], Layout(4, 1, 2, tuple(BUCKETS)), [Layout(4, 1, 2), Layout(4, 2, 1, tuple(BUCKETS))]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_live_optimizer_equals_the_one_that_was_saved(name: str, tmp_path: Path) -> None:
    model, source, targets = CASES[name]
    saved = train(source.ranks, source.tensor, source.pipeline, folder=tmp_path / "saved", more=[*model, *source.more])
    assert saved.returncode == 0, saved.output[-4000:]
    truth = assemble(tmp_path / "saved" / "dump" / "after_save_0000004")
    for number, target in enumerate(targets):
        folder = tmp_path / str(number)
        run = launch(
            target.ranks, tmp_path / "saved" / "checkpoints", target.tensor, target.pipeline,
            folder=folder, more=[*model, *target.more],
        )  # fmt: skip
        assert run.returncode == 0, (target, run.output[-4000:])
        assert "[mcore_ckpt_ext] optimizer resumed" in run.output, target
        assert_equal(truth, assemble(folder / "dump" / "after_load"), target)


def assert_equal(truth: dict[str, torch.Tensor], live: dict[str, torch.Tensor], target: Layout) -> None:
    """Bit for bit, every kind and tensor."""
    assert live.keys() == truth.keys(), target
    for key, expected in truth.items():
        assert torch.equal(live[key], expected), (target, key)
