"""Test that genuine Megatron-LM without this package resumes what `convert` wrote, with every live element.

By default, megatron-core 0.19.2 runs all of them in one launch; with MEGATRON_LM_PATH, a checkout resumes torch_dist
and legacy files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu.dump_optimizer import assemble

import mcore_ckpt_ext
from mcore_ckpt_ext.settings import LOAD
from mcore_ckpt_ext.targets import Target
from tests.harness import jobs
from tests.harness.checkouts import EITHER, checkout_job, full_version, installed_is_before, with_another_release
from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import LEGACY, OFF, SAVED, differing
from tests.harness.layouts import SEQUENCE, Layout
from tests.harness.models import LLAMA, experts
from tests.harness.thorough import rows_of_run
from tests.harness.turns import Results, Turn, run_in_turn

NO_RANDOM_STATE = ["--no-load-rng"]


def resume(
    fixture: str,
    layout: Layout,
    folder: Path,
    more: list[str],
    target: Target,
    *,
    checkout: bool = False,
) -> None:
    source = fixture_named(fixture)
    mcore_ckpt_ext.convert(source.run, folder / "run", target)
    layout = replace(layout, vocabulary=source.job["args"]["padded_vocab_size"])
    how = checkout_job() if checkout else {}
    job = jobs.resume(folder, layout, folder / "run", more=more, environment=OFF, **how)
    assert job.said == []
    # It went on from the stored iteration; a loader that found nothing would begin with the first.
    assert list(job.losses) == [SAVED + 1]
    assert differing(source.truth, assemble(job.at_load)) == []


# Written from dp_reshardable of 0.16 and 0.19, from legacy files, from experts of two ranks, and of every optimizer:
# what was offloaded, or kept as remainders, is Adam's in a DistributedOptimizer; the others stay what they were.
WHOLE, MUON = (), ("--optimizer", "muon")
# 0.17 refuses `muon` with a distributed optimizer (megatron/training/arguments.py, `validate_args`).
LAYER_WISE = ("--optimizer", "dist_muon") if installed_is_before(0, 18) else (*MUON, "--use-distributed-optimizer")
TORCH_DIST: dict[str, tuple[Layout, dict[str, Any]]] = {
    "p02": (Layout(1, 1, 4), {"more": LLAMA}),
    "p08b": (Layout(1, 4, 4), {}),
    "p09": (Layout(2, 1, 4), {"more": experts(2, *SEQUENCE)}),
    "p10": (Layout(2, 2, 4), {}),
    "p41": (Layout(1, 2, 4), {"optimizer": WHOLE}),
    "p42": (Layout(2, 1, 4), {"optimizer": WHOLE, "precision": ()}),
    "p43": (Layout(2, 1, 4), {"optimizer": MUON}),
    "p44": (Layout(2, 1, 4), {"optimizer": LAYER_WISE}),
    "p45": (Layout(2, 1, 4), {}),
    "p46": (Layout(1, 2, 4), {}),
    "p47": (Layout(2, 1, 4), {}),
    "p47b": (Layout(2, 1, 4), {}),
    "p48": (Layout(1, 2, 4), {}),
}


# With this package, which reads for Megatron: a gated model, experts, whole optimizers, in fp32 as well.
FAST = ("p02", "p09", "p41", "p42")
DAILY = ("p02", "p08b", "p42", "p44", "p47")


def rows(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in DAILY else [pytest.mark.nightly]) for name in names]


@pytest.fixture(scope="module", params=EITHER)
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder, turns, fast = tmp_path_factory.mktemp("stock"), [], []
    needed = rows_of_run(request, "fixture", "resumed")
    target = mcore_ckpt_ext.TorchDist(
        megatron_version=full_version() if request.param else metadata.version("megatron-core")
    )
    for name, (layout, options) in TORCH_DIST.items():
        if (name, request.param) not in needed:
            continue
        source = fixture_named(name)
        mcore_ckpt_ext.convert(source.run, folder / f"{name} run", target)
        layout = replace(layout, vocabulary=source.job["args"]["padded_vocab_size"])
        options = {"more": model_of(name), **options}
        turns.append(Turn(folder / name, layout, load=folder / f"{name} run", stock=True, **options))
        if name in FAST:
            environment = {LOAD.name: "fast"}
            where = folder / f"{name} fast"
            fast.append(Turn(where, layout, load=folder / f"{name} run", environment=environment, **options))
    return run_in_turn(folder, fast + turns, of_checkout=request.param)


@pytest.mark.parametrize("fixture", rows(FAST))
def test_fast_load_agrees_with_stock(fixture: str, resumed: Results) -> None:
    fast, stock = resumed.job(f"{fixture} fast"), resumed.job(fixture)
    (line,) = fast.said
    assert "MB of tensors read in" in line
    assert fast.losses == stock.losses
    loaded, expected = assemble(fast.at_load), assemble(stock.at_load)
    assert len(expected) > 50
    assert differing(expected, loaded) == []


@pytest.mark.parametrize("fixture", rows(TORCH_DIST))
def test_torch_dist_in_stock_megatron(fixture: str, resumed: Results) -> None:
    if {"muon", "dist_muon"} & set(TORCH_DIST[fixture][1].get("optimizer", ())):
        pytest.importorskip("emerging_optimizers", reason="the extra `test` installs it")
        if resumed.megatron == "0.16":
            pytest.skip("the Muon of 0.16 does not run with emerging-optimizers 0.3.0")
    job = resumed.job(fixture)
    assert job.said == []
    assert list(job.losses) == [SAVED + 1]
    truth = {key: value for key, value in fixture_named(fixture).truth.items() if "param_remainder." not in key}
    assert differing(truth, assemble(job.at_load)) == []


def model_of(fixture: str) -> list[str]:
    """Arguments of the model that a fixture was trained with."""
    return LLAMA if fixture_named(fixture).job["args"]["swiglu"] else []


@with_another_release
@pytest.mark.parametrize(
    ("fixture", "layout"), [("p10", Layout(2, 2, 8)), ("p01", Layout(1, 1, 2)), ("p08b", Layout(4, 1, 4))]
)
def test_torch_dist_in_a_checkout(fixture: str, layout: Layout, tmp_path: Path) -> None:
    target = mcore_ckpt_ext.TorchDist(megatron_version=full_version())
    resume(fixture, layout, tmp_path, [], target, checkout=True)


@with_another_release
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
