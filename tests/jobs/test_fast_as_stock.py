"""Compare `--ckpt-ext-load fast` with Megatron's own loader, for every real checkpoint that Megatron can load.

Each is loaded under its own layout (with other numbers of data-parallel ranks) and, if stock reshards it, under
another, once by stock alone and once with `fast`, and trained for one step: model, optimizer, settings and loss are
equal bit for bit. Checkpoints that stock loads wrongly or not at all are resumed by this package with both ways of
reading weights. All jobs are one launch. With MEGATRON_LM_PATH, a checkout runs them as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import assemble, parameter_settings, training_state
from megatron_on_cpu.precision_aware import REMAINDERS_VARIABLE

from mcore_ckpt_ext.settings import LOAD, READ_ONCE
from tests.harness.checkouts import EITHER, version
from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import SAVED, differing
from tests.harness.layouts import Layout, experts_over
from tests.harness.models import GATED_EXPERTS, LLAMA, QUERIES, experts
from tests.harness.packages import with_transformer_engine
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

RANKS = 4
WHOLE, MUON = (), ("--optimizer", "muon")
AWARE = ["--use-precision-aware-optimizer"]
REDUCED = [*AWARE, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
OFFLOAD = [*AWARE, "--optimizer-cpu-offload", "--optimizer-offload-fraction"]
ENGINE = ["--transformer-impl", "transformer_engine", "--clip-grad", "0"]
FAST, SLOW = {LOAD.name: "fast"}, {LOAD.name: "stock"}


@dataclass(frozen=True)
class Loaded:
    """A load of a real checkpoint.

    Attributes:
        fixture: its name.
        layout: of the job that loads it.
        options: of `Turn`.
        by_stock: whether stock alone loads it, and right.
    """

    fixture: str
    layout: Layout
    options: dict[str, Any] = field(default_factory=dict)
    by_stock: bool = True


def more(*arguments: str) -> dict[str, Any]:
    """Arguments of the model."""
    return {"more": arguments}


LOADS = {
    "p01": Loaded("p01", Layout(1, 4, 4)),
    "p02": Loaded("p02", Layout(2, 2, 4), more(*LLAMA)),
    "p03": Loaded("p03", Layout(1, 2, 4, virtual=True)),
    "p04": Loaded("p04", Layout(1, 4, 4)),
    "p04, TP2": Loaded("p04", Layout(2, 2, 4)),
    "p05": Loaded("p05", Layout(1, 4, 4), by_stock=False),
    "p06": Loaded("p06", Layout(1, 4, 4)),
    "p09": Loaded("p09", Layout(1, 2, 4), more(*experts(2), "--no-load-rng")),  # 0.16 keeps them under other keys
    "p12": Loaded("p12", Layout(1, 2, 4), more("--num-layers", "2"), by_stock=False),
    "p41": Loaded("p41", Layout(2, 2, 4), {"optimizer": WHOLE}),
    "p41, TP1": Loaded("p41", Layout(1, 4, 4), {"optimizer": WHOLE}),
    "p42": Loaded("p42", Layout(1, 2, 4), {"optimizer": WHOLE, "precision": (), **more(*LLAMA)}),
    "p43": Loaded("p43", Layout(1, 2, 4), {"optimizer": MUON, **more(*LLAMA)}),
    "p43, TP2": Loaded("p43", Layout(2, 2, 4), {"optimizer": MUON, **more(*LLAMA)}),
    "p44": Loaded("p44", Layout(1, 2, 4), {"optimizer": (*MUON, "--use-distributed-optimizer")}),
    "p44, TP2": Loaded("p44", Layout(2, 2, 4), {"optimizer": (*MUON, "--use-distributed-optimizer")}),
    "p45": Loaded("p45", Layout(1, 2, 4), more(*OFFLOAD, "1.0"), by_stock=False),
    "p46": Loaded("p46", Layout(2, 1, 4), more(*LLAMA, *OFFLOAD, "0.5"), by_stock=False),
    "p47": Loaded("p47", Layout(1, 2, 4), more(*AWARE)),
    "p48": Loaded("p48", Layout(2, 1, 4), {"environment": {REMAINDERS_VARIABLE: "0"}, **more(*LLAMA, *REDUCED)}),
    "p49": Loaded("p49", Layout(2, 2, 4), more(*LLAMA), by_stock=False),
}
# Also with what several ranks want read by one of them: replicas of everything, experts, tied copies in a resume.
ONCE = ("p42", "p09", "p05")
# Written by jobs with a real build of Transformer Engine; see `test_transformer_engine`.
ENGINE_LOADS = {
    "p21": Loaded("p21", Layout(2, 2, 4), more(*LLAMA, "--add-qkv-bias", "--qk-layernorm", *ENGINE)),
    "p22": Loaded(
        "p22", experts_over(1, 2, 4, 2),
        more(*GATED_EXPERTS, *QUERIES, "--moe-grouped-gemm", "--moe-ffn-hidden-size", "16",
             "--moe-shared-expert-intermediate-size", "24", "--moe-layer-freq", "[0,1,1,1]", *ENGINE),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=EITHER)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Every load both ways."""
    folder = tmp_path_factory.mktemp("both_ways")
    loads = {name: LOADS[name] for name in known(request.param)}
    plugins = [launch.PRECISION_AWARE, launch.CPU_OFFLOAD]
    return run_in_turn(folder, in_order(folder, loads, request.param), plugins, of_checkout=request.param)


@pytest.fixture(scope="module")
def with_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """The same with the modules of Transformer Engine, whose extra states are objects."""
    folder = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch:
        with_transformer_engine(patch)
        yield run_in_turn(folder, in_order(folder, ENGINE_LOADS), [launch.SYNTHETIC_TRAINING])


def in_order(folder: Path, loads: Mapping[str, Loaded], of_checkout: bool = False) -> list[Turn]:
    """Stock's own turns last, since they take this package out of the process."""
    turns = [turn for name, load in loads.items() for turn in both_ways(folder, name, load, of_checkout)]
    return sorted(turns, key=lambda turn: bool(turn.order["stock"]))


def known(of_checkout: bool) -> list[str]:
    """Loads that the running Megatron knows the format of: 0.16 does not look where 0.19 keeps the common state."""
    old = of_checkout and version() == "0.16"
    return [name for name, load in LOADS.items() if not (old and "_v0190_" in fixture_named(load.fixture).folder.name)]


def is_by_stock(load: Loaded, of_checkout: bool) -> bool:
    """Whether stock alone loads it, and right.

    On the development head a distributed optimizer steps what Muon does not, and asks for keys that p44, whose
    layer-wise one stepped everything, does not have (`splits_layer_wise`).
    """
    is_split = load.fixture == "p44" and of_checkout and version() == "0.20"
    return load.by_stock and not is_split


def both_ways(folder: Path, name: str, load: Loaded, of_checkout: bool) -> list[Turn]:
    source = fixture_named(load.fixture)
    layout = replace(load.layout, vocabulary=source.job["args"]["padded_vocab_size"])
    options = {"load": source.run, **load.options}
    own, by_stock = options.pop("environment", {}), is_by_stock(load, of_checkout)
    once = {**own, **FAST, READ_ONCE.name: "1"}
    return [
        *(Turn(folder / f"{each} once", layout, environment=once, **options) for each in ONCE if each == name),
        Turn(folder / f"{name} fast", layout, environment={**own, **FAST}, **options),
        Turn(
            folder / f"{name} other",
            layout,
            environment={**own, **SLOW},
            stock=by_stock,
            **options,
        ),
    ]


@pytest.mark.parametrize("name", LOADS)
def test_model_optimizer_and_loss_are_those_of_stock(name: str, results: Results) -> None:
    if name not in known(results.of_checkout):
        pytest.skip("written by a later Megatron than the one that runs")
    check_same(LOADS[name], name, results)


@pytest.mark.parametrize("name", ONCE)
def test_reading_once_gives_every_rank_the_same_state(name: str, results: Results) -> None:
    if name not in known(results.of_checkout):
        pytest.skip("written by a later Megatron than the one that runs")
    fast, once = (results.job(f"{name} {way}") for way in ("fast", "once"))
    assert once.losses == fast.losses
    assert len(once.said) == len(fast.said)
    assert differing(assemble(fast.at_load), assemble(once.at_load)) == []


@pytest.mark.parametrize("name", ENGINE_LOADS)
def test_modules_of_transformer_engine_are_loaded_the_same(name: str, with_engine: Results) -> None:
    check_same(ENGINE_LOADS[name], name, with_engine)


def check_same(load: Loaded, name: str, results: Results) -> None:
    """Model, optimizer, settings, schedule; and the next loss."""
    check_trained(load, name, results)
    at_load = [results.folder(f"{name} {way}") / "dump" / "after_load" for way in ("fast", "other")]
    loaded, expected = map(assemble, at_load)
    assert len(expected) > 50
    assert differing(expected, loaded) == []
    for part in (parameter_settings, training_state):
        assert part(at_load[0]) == part(at_load[1])


def check_trained(load: Loaded, name: str, results: Results) -> None:
    """What the first step made of it."""
    fast, other = map(results.job, (f"{name} fast", f"{name} other"))
    assert list(fast.losses) == [SAVED + 1]
    assert fast.losses == other.losses
    # Of a load that stock does, nothing is said; all else is summed up in one line.
    assert (len(fast.said), len(other.said)) == (1, not is_by_stock(load, results.of_checkout))
