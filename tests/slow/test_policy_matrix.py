"""Compare the load policy with stock Megatron for every fixture and kind of layout, on one release.

Stock Megatron alone and the same job with this package load each fixture. If stock fails or ends in another state, the
policy must not leave the load to it. The installed release runs; with MEGATRON_LM_PATH, that checkout.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from megatron_on_cpu import launch
from megatron_on_cpu.dump_optimizer import assemble, parameter_settings

from mcore_ckpt_ext.megatron.policy import WITHOUT_RANDOM_STATES
from mcore_ckpt_ext.model_space.tensors import PARAM_REMAINDER
from tests.harness.checkouts import VARIABLE, checkout_job
from tests.harness.checkpoints import FIXTURES, fixture_named
from tests.harness.jobs import OFF, SAVED, differing, run_job, with_vocabulary
from tests.harness.layouts import Layout
from tests.harness.sources import PLUGINS, SOURCES, TOKENS, Source, layouts_of
from tests.harness.turns import Results, Turn, run_in_turn

EXPLAIN = {"MCORE_CKPT_EXT_EXPLAIN": "1"}
STOCK, PLUGIN = "stock Megatron loads the optimizer", "this package fills the optimizer"
LESS_RANDOM_STATES = "stock less random states"


@dataclass(frozen=True)
class Row:
    """A load of a fixture under a layout, and how this relates to the one that was saved."""

    fixture: str
    kind: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.fixture}, {self.kind}, {self.layout}"


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
    """Prints what came of each row; both decisions are among all of them."""
    with capsys.disabled():
        for row, one in outcomes.items():
            stock, policy = ("right" if can else "fails or differs" for can in (one.stock_can, one.policy_can))
            mark = "" if one.is_right else "  <-- disagreement"
            print(f"{row}: stock {stock}; policy: {one.decision} ({one.why}) {policy}{mark}")
    if CHOSEN == NAMES:
        assert {one.decision for one in outcomes.values()} >= {"policy", "stock"}
