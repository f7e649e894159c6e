"""Test fp8 scales and histories of Transformer Engine's modules after every resume and conversion.

Genuine Megatron-LM 0.19.2 and Transformer Engine's Python code run over a stand-in for its kernels. Scales and
histories are computed from module, expert and iteration (`fp8_scaling`), so that a misplaced one is detected. All jobs
are one launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import MOMENTS_VARIABLE, assemble, scaling_state, training_state

from mcore_ckpt_ext import Canonical, Legacy, TorchDist, convert, open_checkpoint
from mcore_ckpt_ext.formats.expert_states import scaling_of
from tests.harness.jobs import LAST, LEGACY, SAVED, differing
from tests.harness.layouts import SEQUENCE, Layout, expert_sizes, experts_over
from tests.harness.models import GATED_EXPERTS, LLAMA
from tests.harness.packages import with_transformer_engine
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

_FP8 = ["--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--fp8-amax-history-len", "3"]
_FP8 += ["--fp8-amax-compute-algo", "max", "--transformer-impl", "transformer_engine", "--clip-grad", "0"]
DENSE, ONE_BY_ONE = [*LLAMA, *_FP8], [*GATED_EXPERTS, *_FP8]
GROUPED = [*ONE_BY_ONE, "--moe-grouped-gemm"]
SQUARE, SPREAD = Layout(2, 2, 4), experts_over(1, 2, 4, 2)
CUT = Layout(2, 1, 4, more=(*SEQUENCE, *expert_sizes(1, 2)))
ALONE, APART = experts_over(2, 1, 4, 1), experts_over(1, 1, 4, 4)

SAVES = {
    "grouped": (SPREAD, GROUPED),
    "one by one": (SPREAD, ONE_BY_ONE),
    "legacy dense": (SQUARE, [*DENSE, *LEGACY]),
    "legacy grouped": (SPREAD, [*GROUPED, *LEGACY]),
    "legacy one by one": (SPREAD, [*ONE_BY_ONE, *LEGACY]),
}


@dataclass(frozen=True)
class Resumed:
    """A job that goes on from another; `to`: what that was converted to before, for stock Megatron."""

    source: str
    layout: Layout
    model: list[str]
    to: tuple[Any, ...] = ()

    def load(self, folder: Path) -> Path:
        return folder / (f"{self.source} for {self.layout}" if self.to else f"{self.source}/checkpoints")

    def commands(self, folder: Path) -> list[list[Any]]:
        """Of `mcore-ckpt`."""
        return [["convert", folder / self.source / "checkpoints", self.load(folder), "--to", *self.to]] * bool(self.to)


RESUMES = {
    "grouped, TP2": Resumed("grouped", ALONE, GROUPED),
    "grouped, EP4": Resumed("one by one", APART, GROUPED),
    "grouped one by one": Resumed("grouped", SPREAD, ONE_BY_ONE),
    "dense, TP1": Resumed("legacy dense", Layout(1, 2, 4), [*DENSE, *LEGACY]),
    "legacy grouped, TP2": Resumed("legacy grouped", ALONE, [*GROUPED, *LEGACY]),
    "legacy grouped, EP4": Resumed("legacy grouped, TP2", APART, [*GROUPED, *LEGACY]),
    "legacy grouped one by one": Resumed("legacy grouped", SPREAD, [*ONE_BY_ONE, *LEGACY]),
    "legacy one by one grouped": Resumed("legacy one by one", APART, [*GROUPED, *LEGACY]),
}
_FOR_CUT = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 1)
_FOR_CUT += ("--expert-model-parallel-size", 1)
CONVERTED = {
    "torch_dist to legacy": Resumed("grouped", CUT, [*GROUPED, *LEGACY, "--no-load-rng"], ("legacy", *_FOR_CUT)),
    "legacy to torch_dist": Resumed("legacy grouped", APART, GROUPED, ("torch_dist",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    folder = tmp_path_factory.mktemp("fp8")
    both = {MOMENTS_VARIABLE: "load,save"}
    turns = [Turn(folder / name, layout, more=more, saves=True, until=SAVED) for name, (layout, more) in SAVES.items()]
    turns += [
        Turn(
            folder / name, job.layout, more=job.model, load=job.load(folder), saves=job.source in SAVES, until=LAST,
            newest=LAST, environment=both,
        )
        for name, job in RESUMES.items()
    ]  # fmt: skip
    turns += [
        Turn(
            folder / name, job.layout, more=job.model, load=job.load(folder), stock=True, environment=both,
            commands=job.commands(folder),
        )
        for name, job in CONVERTED.items()
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        with_transformer_engine(patch)
        yield run_in_turn(folder, turns, [launch.SYNTHETIC_TRAINING])


def truth_of(results: Results, name: str) -> dict[str, torch.Tensor]:
    """Live when a job's newest checkpoint was saved."""
    iteration = SAVED if name in SAVES else LAST
    return scaling_state(results.job(name).folder / "dump" / f"after_save_{iteration:07d}")


def stored_in(run: Path) -> Mapping[str, torch.Tensor]:
    states = open_checkpoint(run).states.extra().items()
    found = {(name, kind): values for name, state in states for kind, values in scaling_of(state).items()}
    return {f"{name.removesuffix('_extra_state')}{kind}": values for (name, kind), values in found.items()}


def assert_same(truth: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], count: int) -> None:
    assert len(truth) == count
    assert found.keys() == truth.keys()
    assert differing(truth, found) == []


def count_of(name: str) -> int:
    """Four numbers of two linears of attention, and two of an MLP or of each of four experts, in four layers."""
    return 4 * 4 * (2 + (2 if "dense" in name else 8))


@pytest.mark.parametrize("name", [*RESUMES, *CONVERTED])
def test_resumed_with_every_scale_and_history(results: Results, name: str) -> None:
    job, resumed = (RESUMES | CONVERTED)[name], results.job(name)
    assert_same(truth_of(results, job.source), scaling_state(resumed.at_load), count_of(name))
    saved = results.job(job.source).folder / "dump" / f"after_save_{SAVED if job.source in SAVES else LAST:07d}"
    assert differing(assemble(saved), assemble(resumed.at_load)) == []
    assert training_state(saved) == training_state(resumed.at_load)
    assert bool(resumed.said) == (name in RESUMES)
    assert "start empty" not in resumed.output


@pytest.mark.parametrize("name", [name for name in SAVES if name != "one by one"])
def test_converted_there_and_back(results: Results, name: str, tmp_path: Path) -> None:
    run, truth = results.job(name).run, truth_of(results, name)
    assert_same(truth, stored_in(run), count_of(name))
    experts = {} if "dense" in name else {"expert_model_parallel_size": 1}
    apart = {} if "dense" in name else {"expert_model_parallel_size": 4}
    one = Legacy(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, **experts)
    many = Legacy(tensor_model_parallel_size=1, pipeline_model_parallel_size=4, **apart)
    for number, target in enumerate((TorchDist(), TorchDist(megatron_version="0.16"), Canonical(), one, many)):
        there, back = tmp_path / f"{number}", tmp_path / f"{number} back"
        reports = [convert(run, there, target), convert(there, back, Legacy() if "legacy" in name else TorchDist())]
        assert not [note for report in reports for note in report.notes if "extra states" in note]
        for written in (there, back):
            assert_same(truth, stored_in(written), count_of(name))
