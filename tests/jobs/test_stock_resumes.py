"""What `convert` wrote, in genuine Megatron-LM without this package: it resumes, and every live element is the truth's.

The default runs use megatron-core 0.19.2; with MEGATRON_LM_PATH, a checkout resumes torch_dist and legacy files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble

import mcore_ckpt_ext
from mcore_ckpt_ext.targets import Target
from tests.harness import jobs
from tests.harness.checkouts import checkout_job, full_version, with_checkout
from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import LEGACY, OFF, SAVED, differing
from tests.harness.layouts import SEQUENCE, Layout
from tests.harness.models import LLAMA, experts

NO_RANDOM_STATE = ["--no-load-rng"]


def resume(
    fixture: str,
    layout: Layout,
    folder: Path,
    more: list[str],
    target: Target,
    *,
    checkout: bool = False,
    distributed: bool = True,
) -> None:
    source = fixture_named(fixture)
    mcore_ckpt_ext.convert(source.run, folder / "run", target)
    layout = replace(layout, vocabulary=source.job["args"]["padded_vocab_size"])
    how = checkout_job() if checkout else {}
    job = jobs.resume(folder, layout, folder / "run", more=more, environment=OFF, distributed=distributed, **how)
    assert job.said == []
    # It went on from the stored iteration; a loader that found nothing would begin with the first.
    assert list(job.losses) == [SAVED + 1]
    assert differing(source.truth, assemble(job.at_load)) == []


@pytest.mark.parametrize(
    ("fixture", "layout", "more"),
    [
        ("p10", Layout(2, 2, 8), []),
        ("p02", Layout(1, 1, 2), LLAMA),
        ("p08b", Layout(1, 4, 4), []),
        ("p09", Layout(2, 2, 8), experts(2, "--sequence-parallel")),
    ],
)
def test_torch_dist_in_stock_megatron(fixture: str, layout: Layout, more: list[str], tmp_path: Path) -> None:
    """Written from dp_reshardable of 0.19 and 0.16, from legacy files, and from experts of two ranks."""
    resume(fixture, layout, tmp_path, more, mcore_ckpt_ext.TorchDist(megatron_version="0.19.2"))


def test_torch_dist_without_a_distributed_optimizer_in_stock_megatron(tmp_path: Path) -> None:
    """It is written as it was, so that stock Megatron reshards it itself."""
    target = mcore_ckpt_ext.TorchDist(megatron_version="0.19.2")
    resume("p41", Layout(1, 2, 4), tmp_path, model_of("p41"), target, distributed=False)


def model_of(fixture: str) -> list[str]:
    """Arguments of the model that a fixture was trained with."""
    return LLAMA if fixture_named(fixture).job["args"]["swiglu"] else []


@with_checkout
@pytest.mark.parametrize(
    ("fixture", "layout"), [("p10", Layout(2, 2, 8)), ("p01", Layout(1, 1, 2)), ("p08b", Layout(4, 1, 4))]
)
def test_torch_dist_in_a_checkout(fixture: str, layout: Layout, tmp_path: Path) -> None:
    target = mcore_ckpt_ext.TorchDist(megatron_version=full_version())
    resume(fixture, layout, tmp_path, [], target, checkout=True)


@with_checkout
@pytest.mark.parametrize(
    ("fixture", "layout", "more", "sizes"),
    [
        ("p01", Layout(2, 2, 8), NO_RANDOM_STATE, {}),
        ("p10", Layout(1, 2, 4), NO_RANDOM_STATE, {}),
        ("p03", Layout(1, 2, 4, virtual=True), [], {"virtual_pipeline_model_parallel_size": 2}),
        ("p09", Layout(2, 2, 8), [*NO_RANDOM_STATE, *experts(2, *SEQUENCE)], {"expert_model_parallel_size": 2}),
        ("p09", Layout(1, 2, 4), [*NO_RANDOM_STATE, *experts(1)], {"expert_model_parallel_size": 1}),
    ],
)
def test_legacy_in_a_checkout(
    fixture: str, layout: Layout, more: list[str], sizes: dict[str, int], tmp_path: Path
) -> None:
    """TP, PP, virtual stages, and experts that move into the dense optimizer."""
    target = mcore_ckpt_ext.Legacy(
        megatron_version=full_version(),
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        **sizes,
    )
    resume(fixture, layout, tmp_path, [*LEGACY, *more], target, checkout=True)
