"""Legacy checkpoints in the genuine Megatron-LM, under another layout: every live element is that of the truth.

The default runs use megatron-core 0.19.2 on checkpoints that 0.16.1 wrote. With MEGATRON_LM_PATH, a checkout that is
able to save legacy checkpoints writes and resumes further kinds of models itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.conftest import fixture_named

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from megatron_on_cpu import dump_optimizer, launch, toy_jobs

VARIABLE = "MEGATRON_LM_PATH"
with_checkout = pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout")
TIME_LIMIT = 240
VOCABULARY = 128
RESUMED = "[mcore_ckpt_ext] optimizer resumed from"
CUT = "[mcore_ckpt_ext] weights of the legacy checkpoint"
EXPERTS = ["--swiglu", "--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2"]
EXPERTS += ["--moe-token-dispatcher-type", "alltoall"]
EXPERT_PARALLEL = ["--expert-model-parallel-size", "2"]
LATENT = ["--multi-latent-attention", "--kv-lora-rank", "16", "--q-lora-rank", "16", "--qk-head-dim", "8"]
LATENT += ["--qk-pos-emb-head-dim", "8", "--v-head-dim", "8", "--position-embedding-type", "rope"]
LATENT += ["--disable-bias-linear", "--normalization", "RMSNorm"]
VIRTUAL = ["--num-layers-per-virtual-pipeline-stage", "1"]
LEGACY = ["--ckpt-format", "torch"]
Layout = tuple[int, int, int]  # ranks, tensor, pipeline


def run(
    folder: Path,
    layout: Layout,
    more: Sequence[str],
    *,
    load: Path | None = None,
    save: Path | None = None,
    checkout: bool = False,
    plugin: bool = True,
    distributed: bool = True,
) -> launch.RunResult:
    """A job that saves at iteration 4, or resumes from there and makes one step; it dumps what it holds."""
    ranks, tensor, pipeline = layout
    arguments = toy_jobs.tiny_gpt(
        tensor, pipeline, iterations=8, save=save, load=load,
        more=["--make-vocab-size-divisible-by", str(VOCABULARY // tensor), "--exit-interval", "4" if save else "5"],
    )  # fmt: skip
    if not distributed:
        arguments.remove("--use-distributed-optimizer")
    environment = {
        dump_optimizer.FOLDER_VARIABLE: str(folder),
        dump_optimizer.MOMENTS_VARIABLE: "save" if save else "load",
        **({} if plugin else {"MCORE_CKPT_EXT": "0"}),
    }
    megatron = Path(os.environ[VARIABLE]) if checkout else None
    script = megatron / "pretrain_gpt.py" if megatron else launch.TRAIN_GPT
    return launch.run(
        ranks, script, [*arguments, *more], timeout=TIME_LIMIT, megatron=megatron, environment=environment
    )


def said(result: launch.RunResult, line: str) -> int:
    return sum(line in text for text in result.output.splitlines())


def assert_equal(truth: dict[str, torch.Tensor], dumps: Path) -> None:
    """Bit for bit, every kind and tensor."""
    live = dump_optimizer.assemble(dumps / "after_load")
    assert live.keys() == truth.keys()
    assert [key for key in truth if not torch.equal(live[key], truth[key])] == []


@pytest.mark.parametrize(
    ("fixture", "layout", "more"),
    [("p08b", (4, 2, 2), LEGACY), ("p08c", (2, 1, 2), ["--num-layers", "2", "--auto-detect-ckpt-format"])],
)
def test_the_live_optimizer_equals_that_of_the_job_that_wrote(
    fixture: str, layout: Layout, more: list[str], tmp_path: Path
) -> None:
    """PP4 to TP2 x PP2; and TP2 without distributed optimizer to PP2 with one."""
    source = fixture_named(fixture)
    result = run(tmp_path, layout, more, load=source.run)
    assert result.returncode == 0, result.output[-6000:]
    assert said(result, RESUMED) == 1
    assert_equal(source.truth, tmp_path)


@with_checkout
def test_an_unchanged_layout_is_left_to_stock(tmp_path: Path) -> None:
    source = fixture_named("p08b")
    result = run(tmp_path, (8, 1, 4), LEGACY, load=source.run, checkout=True)
    assert result.returncode == 0, result.output[-6000:]
    assert "[mcore_ckpt_ext]" not in result.output
    assert_equal(source.truth, tmp_path)


@with_checkout
def test_stock_refuses_what_the_plugin_resumes(tmp_path: Path) -> None:
    result = run(tmp_path, (4, 2, 2), LEGACY, load=fixture_named("p08b").run, checkout=True, plugin=False)
    assert result.returncode != 0
    assert "tensor_model_parallel_size value from checkpoint (1) is not equal" in result.output


@with_checkout
def test_weights_alone_are_cut_too(tmp_path: Path) -> None:
    """Stock 0.16.1 silently leaves half of the layers as they were initialised."""
    source = fixture_named("p08b")
    more = ["--auto-detect-ckpt-format", "--no-load-optim", "--no-load-rng"]
    result = run(tmp_path, (2, 1, 2), more, load=source.run, checkout=True)
    assert result.returncode == 0, result.output[-6000:]
    assert said(result, CUT) == 1
    live = dump_optimizer.assemble(tmp_path / "after_load")
    for key in source.truth:
        if key.startswith("weight."):
            assert torch.equal(live[key], source.truth[key]), key


@with_checkout
@pytest.mark.parametrize(
    ("model", "written", "written_more", "layout", "more"),
    [
        ([*toy_jobs.LLAMA], (4, 2, 2), [], (4, 1, 4), []),
        ([], (4, 1, 2), VIRTUAL, (2, 2, 1), []),
        (LATENT, (2, 2, 1), [], (2, 1, 2), []),
        ([], (2, 1, 2), ["--decoder-first-pipeline-num-layers", "1"], (2, 2, 1), []),
        ([], (2, 1, 2), ["--pipeline-model-parallel-layout", "Ett|ttL"], (2, 2, 1), []),
        ([], (2, 1, 2), ["--overlap-grad-reduce", "--ddp-bucket-size", "4000"], (2, 2, 1), []),
        (EXPERTS, (4, 1, 2), EXPERT_PARALLEL, (4, 1, 4), []),
        (EXPERTS, (4, 1, 1), EXPERT_PARALLEL, (4, 2, 1), [*EXPERT_PARALLEL, "--sequence-parallel"]),
    ],
    ids=["llama", "virtual", "latent", "uneven", "layout", "buckets", "experts-to-none", "experts-PP1"],
)
def test_written_and_resumed_by_the_checkout(
    model: list[str], written: Layout, written_more: list[str], layout: Layout, more: list[str], tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    saved = run(tmp_path, written, [*model, *written_more, *LEGACY], save=checkpoints, checkout=True, plugin=False)
    assert saved.returncode == 0, saved.output[-6000:]
    truth = dump_optimizer.assemble(tmp_path / "after_save_0000004")
    result = run(tmp_path, layout, [*model, *more, *LEGACY], load=checkpoints, checkout=True)
    assert result.returncode == 0, result.output[-6000:]
    assert said(result, RESUMED) == 1
    assert_equal(truth, tmp_path)
