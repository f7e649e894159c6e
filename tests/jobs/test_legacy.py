"""Test legacy checkpoints in genuine Megatron-LM under another layout: every live element is as saved.

By default, megatron-core 0.19.2 loads checkpoints that 0.16.1 wrote. With MEGATRON_LM_PATH, a checkout that can save
legacy checkpoints writes and resumes further kinds of models itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from megatron_on_cpu.dump_optimizer import assemble

from tests.harness.checkouts import checkout_job, with_another_release
from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import LEGACY, OFF, Job, differing, resume, run_job, train_and_save
from tests.harness.layouts import VIRTUAL, Layout
from tests.harness.models import LLAMA

CUT = "[mcore_ckpt_ext] weights of the legacy checkpoint"
EXPERTS = ["--swiglu", "--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2"]
EXPERTS += ["--moe-token-dispatcher-type", "alltoall"]
EXPERT_PARALLEL = ["--expert-model-parallel-size", "2"]
LATENT = ["--multi-latent-attention", "--kv-lora-rank", "16", "--q-lora-rank", "16", "--qk-head-dim", "8"]
LATENT += ["--qk-pos-emb-head-dim", "8", "--v-head-dim", "8", "--position-embedding-type", "rope"]
LATENT += ["--disable-bias-linear", "--normalization", "RMSNorm"]


def assert_resumed(truth: Mapping[str, torch.Tensor], job: Job) -> None:
    """The package filled the optimizer, and every live element is the truth's."""
    assert job.summary["format"].startswith("legacy")
    assert differing(truth, assemble(job.at_load)) == []


@pytest.mark.parametrize(
    ("fixture", "layout", "more"),
    [("p08b", Layout(2, 2, 4), LEGACY), ("p08c", Layout(1, 2, 2), ["--num-layers", "2", "--auto-detect-ckpt-format"])],
)
def test_the_live_optimizer_equals_that_of_the_job_that_wrote(
    fixture: str, layout: Layout, more: list[str], tmp_path: Path
) -> None:
    """PP4 to TP2 x PP2; and TP2 without distributed optimizer to PP2 with one."""
    source = fixture_named(fixture)
    assert_resumed(source.truth, resume(tmp_path, layout, source.run, more=more))


@pytest.mark.nightly
@pytest.mark.parametrize("fixture", ["p01", "p04"])
def test_a_job_of_legacy_files_detects_a_distributed_checkpoint(fixture: str, tmp_path: Path) -> None:
    """Stock fails, under any layout; it loads the optimizer of the second one once it may."""
    source = fixture_named(fixture)
    more = [*LEGACY, "--auto-detect-ckpt-format"]
    job = resume(tmp_path, Layout(2, 2, 4), source.run, more=more, **checkout_job())
    assert differing(source.truth, assemble(job.at_load)) == []


@with_another_release
def test_an_unchanged_layout_is_left_to_stock(tmp_path: Path) -> None:
    source = fixture_named("p08b")
    job = resume(tmp_path, Layout(1, 4, 8), source.run, more=LEGACY, **checkout_job())
    assert job.said == []
    assert differing(source.truth, assemble(job.at_load)) == []


@with_another_release
def test_stock_refuses_what_the_plugin_resumes(tmp_path: Path) -> None:
    run = fixture_named("p08b").run
    result = run_job(tmp_path, Layout(2, 2, 4), load=run, more=LEGACY, environment=OFF, **checkout_job())
    assert result.returncode != 0
    assert "tensor_model_parallel_size value from checkpoint (1) is not equal" in result.output


@with_another_release
def test_weights_alone_are_cut_too(tmp_path: Path) -> None:
    """Stock 0.16.1 silently leaves half of the layers as they were initialized."""
    source = fixture_named("p08b")
    more = ["--auto-detect-ckpt-format", "--no-load-optim", "--no-load-rng"]
    job = resume(tmp_path, Layout(1, 2, 2), source.run, more=more, **checkout_job())
    assert sum(CUT in line for line in job.said) == 1
    assert differing(weights(source.truth), weights(assemble(job.at_load))) == []


@pytest.mark.parametrize("flags", [["--pretrained-checkpoint"], ["--finetune", "--non-persistent-ckpt-type", "global"]])
def test_weights_are_cut_whatever_names_their_folder(flags: list[str], tmp_path: Path) -> None:
    """Half of the layers stayed as they were initialized; a non-persistent checkpoint there is none."""
    source = fixture_named("p08b")
    load, named = (tmp_path / "nothing", [str(source.run)]) if len(flags) == 1 else (source.run, [])
    job = resume(tmp_path, Layout(1, 2, 2), load, more=["--auto-detect-ckpt-format", *flags, *named])
    assert sum(CUT in line for line in job.said) == 1
    assert differing(weights(source.truth), weights(assemble(job.at_load))) == []


def weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key.startswith("weight.")}


@with_another_release
@pytest.mark.parametrize(
    ("model", "written", "written_more", "layout", "more"),
    [
        (LLAMA, Layout(2, 2, 4), [], Layout(1, 4, 4), []),
        ([], Layout(1, 2, 4), VIRTUAL, Layout(2, 1, 2), []),
        (LATENT, Layout(2, 1, 2), [], Layout(1, 2, 2), []),
        ([], Layout(1, 2, 2), ["--decoder-first-pipeline-num-layers", "1"], Layout(2, 1, 2), []),
        ([], Layout(1, 2, 2), ["--pipeline-model-parallel-layout", "Ett|ttL"], Layout(2, 1, 2), []),
        ([], Layout(1, 2, 2), ["--overlap-grad-reduce", "--ddp-bucket-size", "4000"], Layout(2, 1, 2), []),
        (EXPERTS, Layout(1, 2, 4), EXPERT_PARALLEL, Layout(1, 4, 4), []),
        (EXPERTS, Layout(1, 1, 4), EXPERT_PARALLEL, Layout(2, 1, 4), [*EXPERT_PARALLEL, "--sequence-parallel"]),
    ],
    ids=["llama", "virtual", "latent", "uneven", "layout", "buckets", "experts-to-none", "experts-PP1"],
)
def test_written_and_resumed_by_the_checkout(
    model: list[str], written: Layout, written_more: list[str], layout: Layout, more: list[str], tmp_path: Path
) -> None:
    write = [*model, *written_more, *LEGACY]
    saved = train_and_save(tmp_path / "saved", written, more=write, environment=OFF, **checkout_job())
    resumed = resume(tmp_path / "resumed", layout, saved.run, more=[*model, *more, *LEGACY], **checkout_job())
    assert_resumed(assemble(saved.at_save), resumed)
