"""Compare the load policy with stock Megatron for every fixture and kind of layout, on one release.

Stock Megatron alone and the same job with this package load each fixture. If stock fails or ends in another state, the
policy must not leave the load to it. The installed release runs; with MEGATRON_LM_PATH, that checkout.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import assemble, parameter_settings
from megatron_on_cpu.precision_aware import REMAINDERS_VARIABLE

from mcore_ckpt_ext.megatron.policy import WITHOUT_RANDOM_STATES
from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER
from tests.harness.checkouts import VARIABLE, checkout_job
from tests.harness.checkpoints import FIXTURES, fixture_named
from tests.harness.jobs import LEGACY, OFF, RANK_SCRIPTS, SAVED, differing, run_job, with_vocabulary
from tests.harness.layouts import SEQUENCE, Layout, expert_sizes
from tests.harness.models import GATED_EXPERTS, LLAMA, QUERIES
from tests.harness.turns import Results, Turn, run_in_turn

EXPLAIN = {"MCORE_CKPT_EXT_EXPLAIN": "1"}
STOCK, PLUGIN = "stock Megatron loads the optimizer", "this package fills the optimizer"
LESS_RANDOM_STATES = "stock less random states"
TOKENS = 128
MUON = ("--optimizer", "muon")
AWARE = ["--use-precision-aware-optimizer"]
OFFLOAD = [*AWARE, "--optimizer-cpu-offload", "--optimizer-offload-fraction"]
GATED_TWO = ["--num-layers", "2", "--swiglu", "--ffn-hidden-size", "64"]
UNTIED = ["--untie-embeddings-and-output-weights"]
ENGINE = [*LLAMA, "--add-qkv-bias", "--qk-layernorm"]
SHARED = [*GATED_EXPERTS, *QUERIES, "--moe-ffn-hidden-size", "16", "--moe-shared-expert-intermediate-size", "24"]
PLUGINS = (launch.PRECISION_AWARE, launch.CPU_OFFLOAD)


@dataclass(frozen=True)
class Source:
    """How a job that fits a fixture differs from the tiny GPT.

    Attributes:
        more: arguments of the model and of what is loaded.
        options: of `Turn`.
        plugins: of the launch, besides those of all.
    """

    more: Sequence[str] = ()
    options: dict[str, Any] = field(default_factory=dict)
    plugins: tuple[Path, ...] = ()


SOURCES = {
    "p02": Source(LLAMA),
    "p07": Source(["--max-position-embeddings", "35"]),
    "p08": Source(LEGACY),
    "p08b": Source(LEGACY),
    "p08c": Source(["--num-layers", "2", *LEGACY], {"optimizer": ()}),
    "p09": Source(GATED_EXPERTS),
    "p11": Source(["--overlap-grad-reduce", "--ddp-bucket-size", "3000"]),
    "p12": Source(["--num-layers", "2"]),
    "p21": Source(ENGINE),
    "p22": Source([*SHARED, "--moe-layer-freq", "[0,1,1,1]"], plugins=(RANK_SCRIPTS / "separate_norm.py",)),
    "p23": Source(["--hidden-size", "64", "--ffn-hidden-size", "32", "--kv-channels", "8"]),
    "p31": Source([*GATED_TWO, *UNTIED]),
    "p32": Source(["--num-layers", "2", *UNTIED]),
    "p33": Source(GATED_TWO),
    "p41": Source((), {"optimizer": ()}),
    "p42": Source(LLAMA, {"optimizer": (), "precision": ()}),
    "p43": Source(LLAMA, {"optimizer": MUON}),
    "p44": Source((), {"optimizer": (*MUON, "--use-distributed-optimizer")}),
    "p45": Source([*OFFLOAD, "1.0"]),
    "p46": Source([*LLAMA, *OFFLOAD, "0.5"]),
    "p47": Source(AWARE),
    "p47b": Source(AWARE),
    "p48": Source(
        [*LLAMA, *AWARE, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"],
        {"environment": {REMAINDERS_VARIABLE: "0"}},
    ),
    "p49": Source(LLAMA),
    "p51": Source(["--num-layers", "2", *UNTIED]),
}
"""Fixtures whose job is not the tiny GPT with Adam in a DistributedOptimizer."""


@dataclass(frozen=True)
class Row:
    """A load of a fixture under a layout, and how this relates to the one that was saved."""

    fixture: str
    kind: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.fixture}, {self.kind}, {self.layout}"


def layouts_of(name: str) -> dict[str, Layout]:
    """The layout that was saved, the same with fewer data-parallel ranks, and two others with as many rows."""
    written = fixture_named(name).job
    tensor, pipeline, ranks = written["layout"]["tp"], written["layout"]["pp"], written["world_size"]
    experts = written["layout"].get("ep", 1) or 1
    rows = (written.get("args") or {}).get("padded_vocab_size") or TOKENS
    own = Layout(tensor, pipeline, ranks, virtual=bool(written["layout"].get("vpp")), vocabulary=rows)
    found = {"own": own}
    if (ranks // 2) % (tensor * pipeline) == 0:
        found["less data"] = replace(own, ranks=ranks // 2)
    others = [one for one in _OTHERS if one != (tensor, pipeline)]
    found.update({f"moved {number}": Layout(*one, 4, vocabulary=rows) for number, one in enumerate(others[:2], 1)})
    if "--num-experts" not in SOURCES.get(name, Source()).more:
        return found
    return {kind: replace(one, more=_of_experts(one, experts)) for kind, one in found.items()}


def _of_experts(layout: Layout, experts: int) -> tuple[str, ...]:
    fitting = min(experts, layout.ranks // layout.pipeline)
    return (*(SEQUENCE if layout.tensor > 1 else ()), *expert_sizes(fitting, 1))


# Tensor-parallel size and number of stages: that the two query groups and the two layers of some models allow.
_OTHERS = ((2, 1), (1, 2), (1, 1))
NAMES = [name.partition("_")[0] for name in FIXTURES]
CHOSEN = os.environ.get("TEST_MATRIX", "").split() or NAMES
"""Fixtures to load; TEST_MATRIX names some, for a part of the matrix."""
ALONE = ("p21", "p22")
"""Fixtures of which stock fails on some ranks alone, while others wait: a launch for each."""
ROWS = [Row(name, kind, layout) for name in CHOSEN for kind, layout in layouts_of(name).items()]


def turn_of(folder: Path, row: Row, *, stock: bool) -> Turn:
    source = SOURCES.get(row.fixture, Source())
    options = {**source.options, "environment": {**EXPLAIN, **source.options.get("environment", {})}}
    return Turn(
        folder / f"{row} by {'stock' if stock else 'policy'}", row.layout, more=source.more,
        load=fixture_named(row.fixture).run, until=SAVED + 1, stock=stock, **options,
    )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What came of a row: whether each ended in the saved state, and to whom the policy left it."""

    stock_can: bool
    policy_can: bool
    decision: str
    why: str

    @property
    def is_right(self) -> bool:
        """Whether the policy left nothing to stock that stock cannot do, and did itself what it did not leave."""
        if self.decision == "refused":
            return not self.stock_can
        return self.policy_can and (self.decision != "stock" or self.stock_can)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Row, Outcome]:
    """Every row both ways, in one launch for each number of ranks and set of plugins; rows of stock come last."""
    found = {}
    for ranks, plugins in sorted({launch_of(row) for row in ROWS}):
        folder = tmp_path_factory.mktemp(f"matrix_{ranks}_")
        rows = [row for row in ROWS if launch_of(row) == (ranks, plugins)]
        turns = [turn_of(folder, row, stock=False) for row in rows]
        turns += [turn_of(folder, row, stock=True) for row in rows if row.fixture not in ALONE]
        results = run_in_turn(folder, turns, [*PLUGINS, *plugins], of_checkout=VARIABLE in os.environ)
        results.update({f"{row} by stock": alone(folder, row) for row in rows if row.fixture in ALONE})
        found.update({row: outcome_of(results, row) for row in rows})
    return found


def launch_of(row: Row) -> tuple[int, tuple[Path, ...]]:
    """The number of ranks, and the plugins, of the launch in which a row runs."""
    return row.layout.ranks, SOURCES.get(row.fixture, Source()).plugins


def alone(folder: Path, row: Row) -> launch.RunResult:
    """What stock makes of a row in a launch of its own."""
    source, checkout = SOURCES.get(row.fixture, Source()), checkout_job() if VARIABLE in os.environ else {}
    return run_job(
        folder / f"{row} by stock", row.layout, more=source.more, load=fixture_named(row.fixture).run,
        until=SAVED + 1, environment=OFF, plugins=[*PLUGINS, *source.plugins], **source.options, **checkout,
    )  # fmt: skip


def outcome_of(results: Results, row: Row) -> Outcome:
    by_policy = results[f"{row} by policy"]
    lines = [line for line in by_policy.output.splitlines() if STOCK in line or PLUGIN in line]
    if by_policy.returncode:
        decision = "refused" if "mcore_ckpt_ext refused" in by_policy.output else "failed"
    elif lines and PLUGIN in lines[0]:
        decision = "policy"
    else:
        decision = LESS_RANDOM_STATES if lines and WITHOUT_RANDOM_STATES in lines[0] else "stock"
    why = lines[0].partition("because of: ")[2].partition(". Stock")[0] if lines else ""
    stock_can, policy_can = (ends_as_saved(results, row, f"{row} by {who}") for who in ("stock", "policy"))
    return Outcome(stock_can, policy_can, decision, why)


def ends_as_saved(results: Results, row: Row, name: str) -> bool:
    """Whether a load ended with every bit of weights, masters and moments, padding aside, and with the saved steps."""
    dump = results.folder(f"{row} by policy").parent / name / "dump" / "after_load"
    # Where Megatron finds nothing to load, it begins anew, and nothing is dumped.
    if results[name].returncode != 0 or not dump.is_dir():
        return False
    # Masters are dumped whole, and the truth has their remainders besides.
    written = {key: value for key, value in fixture_named(row.fixture).truth.items() if PARAM_REMAINDER not in key}
    truth, found = (with_vocabulary(one, TOKENS) for one in (written, assemble(dump)))
    steps = {settings.get("step", SAVED) for settings in parameter_settings(dump).values()}
    return differing(truth, found) == [] and steps == {SAVED}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_stock_succeeds_where_the_policy_chooses_it(row: Row, outcomes: dict[Row, Outcome]) -> None:
    assert outcomes[row].is_right, outcomes[row]


def test_the_table(outcomes: dict[Row, Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what came of each row; both decisions are among them."""
    with capsys.disabled():
        for row, one in outcomes.items():
            stock, policy = ("right" if can else "fails or differs" for can in (one.stock_can, one.policy_can))
            mark = "" if one.is_right else "  <-- disagreement"
            print(f"{row}: stock {stock}; policy: {one.decision} ({one.why}) {policy}{mark}")
    assert {one.decision for one in outcomes.values()} >= {"policy", "stock"}
