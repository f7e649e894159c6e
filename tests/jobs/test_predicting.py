"""Test multi-token prediction and custom stage layouts, where content alone reveals no order.

Remainders fit any weight, and parameters that have hardly been trained are alike in all layers: then only the local
models that every rank built show which parameter lies where.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext import open_checkpoint, verify
from mcore_ckpt_ext.layout.sidecar import FILE_NAME
from tests.harness.checkouts import EITHER, checkout_job, version
from tests.harness.jobs import OFF, SAVED, copy_of, differing, resume, train_and_save
from tests.harness.layouts import Layout
from tests.harness.models import GATED
from tests.harness.packages import with_transformer_engine
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

# Parameters of multiples of 64 elements: else Megatron cannot save what it pads.
PREDICTING = [*GATED, "--mtp-num-layers", "1", "--hidden-size", "64"]
STATED = ("--pipeline-model-parallel-layout", "Et|tt|t|mL")
# Norms are all ones still, and moments tiny.
WARMING_UP = ["--lr", "1e-7", "--min-lr", "1e-8"]
REMAINDERS = ["--use-precision-aware-optimizer"]


@pytest.mark.parametrize("of_checkout", EITHER)
@pytest.mark.parametrize("options", [REMAINDERS, WARMING_UP], ids=["remainders", "early warm-up"])
def test_resumes_under_another_layout_without_a_sidecar(options: list[str], of_checkout: bool, tmp_path: Path) -> None:
    if of_checkout and version() not in ("0.16", "0.19"):
        pytest.skip("from 0.20 on, layers that predict need Transformer Engine: their norms are looked for among its")
    plugins = [launch.PRECISION_AWARE] if options is REMAINDERS else []
    model = {"more": [*PREDICTING, *options], "plugins": plugins, **(checkout_job() if of_checkout else {})}
    source = Layout(1, 2, 2, more=STATED)
    saved = train_and_save(tmp_path / "saved", source, until=SAVED + 1, environment=OFF, **model)
    assert verify(saved.run).sound
    resumed = resume(tmp_path / "resumed", Layout(2, 1, 2), saved.run, **model)
    assert "the sidecar" not in resumed.output
    expected, found = assemble(saved.at_save), assemble(resumed.at_load)
    # A weight halfway between two may have become the other one, as the kernel has it.
    compared = [name for name in expected if options is not REMAINDERS or not name.startswith("weight.")]
    assert expected.keys() == found.keys()
    assert differing({name: expected[name] for name in compared}, {name: found[name] for name in compared}) == []
    assert resumed.losses[SAVED + 1] == pytest.approx(saved.losses[SAVED + 1], rel=1e-4)


ENGINE = ["--transformer-impl", "transformer_engine", "--clip-grad", "0", *PREDICTING]
STAGES = {
    "one stage after the other": Layout(1, 2, 4),
    "interleaved, the last layer elsewhere": Layout(1, 2, 4, more=STATED),
    "on a stage of its own": Layout(1, 4, 4, more=("--pipeline-model-parallel-layout", "Ett|tt|m|L")),
    "cut": Layout(2, 2, 4, more=("--pipeline-model-parallel-layout", "Ettt|tmL")),
}


@pytest.fixture(scope="module", params=EITHER)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """Jobs with Transformer Engine's spec, whose sidecars record what every rank built."""
    folder = tmp_path_factory.mktemp("recorded")
    turns = [Turn(folder / name, layout, more=ENGINE, saves=True) for name, layout in STAGES.items()]
    with pytest.MonkeyPatch.context() as patch:
        with_transformer_engine(patch)
        yield run_in_turn(folder, turns, [launch.SYNTHETIC_TRAINING], of_checkout=request.param)


@pytest.mark.parametrize("name", STAGES)
def test_the_buffers_are_those_that_megatron_built(name: str, recorded: Results, tmp_path: Path) -> None:
    run = recorded.job(name).run
    bare = copy_of(run, tmp_path / "bare")
    (bare / f"iter_{SAVED:07d}" / FILE_NAME).unlink()
    packings = []
    for checkpoint in (open_checkpoint(run / f"iter_{SAVED:07d}"), open_checkpoint(bare)):
        (buffers,) = checkpoint.optimizer.state().buffers
        packings.append({key: buffers.packing_of(group).packing for key, group in buffers.groups.items()})
        label = "the Transformer Engine layer spec" if len(packings) == 2 else "the sidecar"
        assert checkpoint.optimizer.state().order_sources() == [label]
    assert packings[0] == packings[1]
