"""Test optimizer options that a resume switches on or off: this package converts state that stock silently casts.

Genuine Megatron-LM 0.19.2 and Transformer Engine's Python code run over a stand-in for its kernels; all jobs are one
launch. `--use-precision-aware-optimizer` keeps masters as remainders in bf16, as Megatron's own fp32 masters with fp8,
and in fp16 with `--main-params-dtype fp16`; `--fp8-param-gather` keeps weights in fp8.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest
import torch
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import assemble

from tests.harness.jobs import SAVED, assert_same_training_state, differing
from tests.harness.layouts import Layout
from tests.harness.models import LLAMA
from tests.harness.packages import engine_version, with_transformer_engine
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

SAME, OTHER = Layout(2, 2, 4), Layout(1, 2, 4)
_ENGINE = ["--transformer-impl", "transformer_engine", "--clip-grad", "0"]
_FP8, _GATHER = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"], ["--fp8-param-gather"]
_AWARE, _HALVES = ["--use-precision-aware-optimizer"], ["--main-params-dtype", "fp16"]
_MOMENTS = ["--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp8"]
_OFFLOAD = ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5"]
JOBS = {
    "plain": [],
    "gathered": [*_FP8, *_GATHER],
    "aware": _AWARE,
    "aware in fp8": [*_AWARE, *_FP8],
    "aware and gathered": [*_AWARE, *_FP8, *_GATHER],
    "in halves": [*_AWARE, *_HALVES],
    "offloaded": [*_AWARE, *_OFFLOAD],
}
SWITCHES = [
    *((one, other, SAME) for one, other in permutations(JOBS, 2)),
    ("plain", "moments in fp8", SAME),
    ("moments in fp8", "plain", SAME),
    ("moments in fp8", "moments in fp8", OTHER),
    *((one, other, OTHER) for one, other in zip(JOBS, [*JOBS][1:] + [*JOBS][:1], strict=True)),
    ("aware and gathered", "aware and gathered", OTHER),
    ("aware in fp8", "aware in fp8", OTHER),
]


JOBS["moments in fp8"] = [*_AWARE, *_MOMENTS]


def name_of(one: str, other: str, layout: Layout) -> str:
    return f"{one} to {other}, {'same layout' if layout is SAME else 'other layout'}"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    folder = tmp_path_factory.mktemp("switches")
    turns = [Turn(folder / name, SAME, more=[*LLAMA, *_ENGINE, *more], saves=True, until=SAVED)
             for name, more in JOBS.items()] + [
        Turn(
            folder / name_of(one, other, layout), layout, more=[*LLAMA, *_ENGINE, *JOBS[other]],
            load=folder / one / "checkpoints", until=SAVED,
        )
        for one, other, layout in SWITCHES
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        with_transformer_engine(patch)
        yield run_in_turn(folder, turns, [launch.SYNTHETIC_TRAINING, launch.CPU_OFFLOAD])


@pytest.mark.parametrize(("one", "other", "layout"), SWITCHES, ids=lambda value: str(value))
def test_masters_and_moments_move_to_their_new_home(results: Results, one: str, other: str, layout: Layout) -> None:
    if "gathered" in one and engine_version() < (2, 16):
        pytest.skip("torch's safe reader, and so stock Megatron, refuses what Transformer Engine 2.13 pickles")
    saved, resumed = results.job(one), results.job(name_of(one, other, layout))
    assert any("optimizer resumed from" in line for line in resumed.said)
    assert_same_training_state(saved.at_save, resumed.at_load)
    expected, found = assemble(saved.at_save), assemble(resumed.at_load)
    masters = [name for name in expected if name.startswith("fp32_param.")]
    moments = [name for name in expected if name.startswith("exp_avg")]
    assert (len(masters), len(moments)) == (27, 54)
    if other == "moments in fp8":  # at a scale of each shard
        for name in moments:
            limit = float(expected[name].abs().max()) * 2**-18
            torch.testing.assert_close(found[name], expected[name], rtol=2**-4, atol=limit)
    else:
        assert differing({name: expected[name] for name in moments}, {name: found[name] for name in moments}) == []
    for name in masters:
        if other == "in halves":
            limit = float(expected[name].abs().max()) * 2**-24
            torch.testing.assert_close(found[name], expected[name], rtol=2**-11, atol=limit)
        else:
            assert torch.equal(found[name], expected[name]), name
