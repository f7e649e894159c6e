"""Test generalized tensor parallelism in genuine Megatron-LM 0.19.2: with and without weight shards.

As in `test_transformer_engine`, no forward pass runs and gradients are computed from weights: a job that resumes
exactly continues exactly. The state of a job with weight shards is read from its saves. All jobs are one launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import MOMENTS_VARIABLE, assemble

from mcore_ckpt_ext import TorchDist, convert, open_checkpoint, verify
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.layout.sidecar import FILE_NAME
from tests.harness.checkouts import EITHER, version
from tests.harness.checkpoints import everything_in
from tests.harness.jobs import LAST, SAVED, copy_of, differing
from tests.harness.layouts import Layout
from tests.harness.models import GATED
from tests.harness.packages import with_transformer_engine
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

ENGINE = ["--transformer-impl", "transformer_engine", "--clip-grad", "0", "--hidden-size", "64"]
# Biases of linear layers cannot be cut into shards, nor be whole beside them.
PLAIN = [*ENGINE, "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
WITH_GATES = [*ENGINE, *GATED]


def shards(number: int) -> tuple[str, ...]:
    return ("--tensor-parallel-num-weight-shards", str(number))


TWO = Layout(1, 2, 4, more=shards(2))
FOUR = Layout(2, 1, 4, more=shards(4))
WHOLE = Layout(2, 2, 4)
SAVES = {"two": (TWO, PLAIN), "four": (FOUR, PLAIN), "whole": (WHOLE, PLAIN), "gates": (TWO, WITH_GATES)}
# (source, layout, whether its sidecar is there)
RESUMES = {
    "two, as TP2": ("two", Layout(2, 1, 4), True),
    "two, without a sidecar": ("two", Layout(2, 2, 4), False),
    "two, as four": ("two", FOUR, False),
    "four, as two": ("four", TWO, True),
    "four, as DP4": ("four", Layout(1, 1, 4), False),
    "whole, as two": ("whole", TWO, True),
    "whole, as four": ("whole", FOUR, False),
    "gates, one stage": ("gates", Layout(1, 1, 4, more=shards(2)), False),
}
REFUSED = {"gates, whole": Layout(1, 2, 4), "gates, four": FOUR, "gates, TP2": Layout(2, 1, 4)}


@pytest.fixture(scope="module", params=EITHER)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    if request.param and version() == "0.16":
        pytest.skip("0.16 has no weight shards")
    folder = tmp_path_factory.mktemp("shards")

    def load(source: str, has_sidecar: bool) -> Path:
        return folder / (source if has_sidecar else f"{source}, bare") / "checkpoints"

    turns = [Turn(folder / name, layout, more=more, saves=True, until=LAST) for name, (layout, more) in SAVES.items()]
    with pytest.MonkeyPatch.context() as patch:
        with_transformer_engine(patch)
        saved = run_in_turn(folder, turns, [launch.SYNTHETIC_TRAINING], of_checkout=request.param)
        for name in SAVES:
            copy = copy_of(saved.job(name).run, folder / f"{name}, bare" / "checkpoints")
            (copy / f"iter_{SAVED:07d}" / FILE_NAME).unlink()
        resumes = [
            Turn(
                folder / name, layout, more=SAVES[source][1], load=load(source, has_sidecar), saves=True, until=LAST,
                newest=LAST, environment={MOMENTS_VARIABLE: "load,save"},
            )
            for name, (source, layout, has_sidecar) in RESUMES.items()
        ] + [
            Turn(folder / name, layout, more=WITH_GATES, load=load("gates", has_sidecar=True))
            for name, layout in REFUSED.items()
        ]  # fmt: skip
        resumed = run_in_turn(folder, resumes, [launch.SYNTHETIC_TRAINING], of_checkout=request.param)
        resumed.update(saved)
        resumed._turns |= saved._turns
        yield resumed


@pytest.mark.parametrize("name", RESUMES)
def test_resumed_and_gone_on_exactly(name: str, results: Results) -> None:
    source, layout, has_sidecar = RESUMES[name]
    saved, resumed = results.job(source), results.job(name)
    assert any("verified equal to their weights" in line for line in resumed.said)
    assert ("the sidecar" in resumed.summary["witnesses"]) == has_sidecar
    truth = everything_in(open_checkpoint(saved.run / f"iter_{LAST:07d}"))
    assert differing(truth, everything_in(open_checkpoint(resumed.run / f"iter_{LAST:07d}"))) == []
    if not any("shards" in word for word in layout.more):  # what is alive there can be put together
        assert differing(everything_in(open_checkpoint(saved.iteration)), assemble(resumed.at_load)) == []


def test_stored_state_equals_live_state(results: Results) -> None:
    """A job without shards tells what it holds itself."""
    saved = results.job("whole")
    assert differing(assemble(saved.at_save), everything_in(open_checkpoint(saved.iteration))) == []


@pytest.mark.parametrize("name", ["two", "four"])
def test_converted_and_back(name: str, results: Results, tmp_path: Path) -> None:
    bare = results.folder(name).with_name(f"{name}, bare") / "checkpoints"
    assert verify(bare).sound
    convert(bare, tmp_path / "out", TorchDist(megatron_version="0.19.2"))
    truth = everything_in(open_checkpoint(results.job(name).iteration))
    assert differing(truth, everything_in(open_checkpoint(tmp_path / "out"))) == []


@pytest.mark.parametrize("name", REFUSED)
def test_gates_are_not_confused(name: str, results: Results) -> None:
    """Megatron files a shard's first half as the gate's: under other shards it loads rows of the one as the other's."""
    refused = results[name]
    assert refused.returncode != 0
    assert "Megatron itself mixes up the rows of gated linears" in refused.output
    assert "resume under the --tensor-model-parallel-size and --tensor-parallel-num-weight-shards" in refused.output


def test_gates_filed_by_shard_are_not_converted(results: Results, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="only a job with the same weight shards reads the rows"):
        convert(results.job("gates").run, tmp_path / "out", TorchDist(megatron_version="0.19.2"))
    assert verify(results.job("gates").run).sound
