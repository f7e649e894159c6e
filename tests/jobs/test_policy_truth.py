"""Compare the load policy with the result of the same load by stock Megatron alone.

If stock fails, or ends in another state than the one that was saved, the policy must not leave the load to stock. If
the policy does so, stock must end in the saved state; only random states may be absent, which stock then does not
request. With this package every load must end in the saved state. Checkpoints that Megatron wrote shifted have their
own rows: stock loads them, and the error shows afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext.megatron.policy import WITHOUT_RANDOM_STATES
from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import OFF, RANK_SCRIPTS, SAVED, differing, run_job
from tests.harness.layouts import SEQUENCE, Layout, experts_over
from tests.harness.models import GATED_EXPERTS, LLAMA
from tests.harness.programs import Programs
from tests.harness.rehearsals import rehearsal_of_resume
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

PLUGINS = [RANK_SCRIPTS / "without_multiplier.py", RANK_SCRIPTS / "model_by_function.py"]
EXPLAIN = {"MCORE_CKPT_EXT_EXPLAIN": "1"}
STOCK, PLUGIN = "stock Megatron loads the optimizer", "this package fills the optimizer"
# Adam's part is in a DistributedOptimizer of its own, beside layer-wise Lion.
LION, SPLIT = ("--optimizer", "lion", "--use-distributed-optimizer"), {"TEST_BY_FUNCTION": "1"}
RANKS = 4
PP4, PP2, TP2 = Layout(1, 4, RANKS), Layout(1, 2, RANKS), Layout(2, 2, RANKS)
WIDE = Layout(2, 2, RANKS, vocabulary=256)


@dataclass(frozen=True)
class Source:
    """What is loaded: a fixture, or the checkpoint of a job that runs first."""

    model: tuple[str, ...] = ()
    fixture: str = ""
    layout: Layout = PP4
    saving: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    optimizer: tuple[str, ...] = ("--use-distributed-optimizer",)


@dataclass(frozen=True)
class Row:
    """A load: its source, the layout, and further flags; `alone` where stock fails on some ranks, and others wait."""

    source: str
    layout: Layout
    more: tuple[str, ...] = ()
    alone: bool = False

    def __str__(self) -> str:
        flags = "".join(f" {flag.lstrip('-')}" for flag in (*self.layout.more, *self.more))
        return f"{self.source} as {self.layout}{flags}"


SOURCES = {
    "p01": Source(fixture="p01"),
    "p03": Source(fixture="p03"),
    "p04": Source(fixture="p04"),
    "p11": Source(fixture="p11"),
    "p12": Source(("--num-layers", "2"), fixture="p12"),
    "p02": Source((*LLAMA,), fixture="p02"),
    "p09": Source((*GATED_EXPERTS,), fixture="p09"),
    "saved": Source(),
    "lr_mult": Source(environment={"TEST_REMOVED_SETTING": "lr_mult"}),
    "experts": Source((*GATED_EXPERTS,), layout=experts_over(1, 2, RANKS, 2)),
    "beside Lion": Source((*LLAMA,), layout=PP2, optimizer=LION, environment=SPLIT),
    "decoupled": Source(saving=("--decoupled-lr", "5e-4")),
}
SHIFTED = [Row("p11", PP2), Row("p11", TP2)]
NEW_RATE = ("--override-opt_param-scheduler", "--lr", "5e-4")
ROWS = [
    Row("p01", PP4),
    Row("p01", TP2),
    Row("p03", Layout(1, 2, RANKS, virtual=True)),
    Row("p03", PP2),
    Row("p04", PP4),
    Row("p04", TP2),
    Row("p02", WIDE),
    Row("p09", experts_over(1, 2, RANKS, 2)),
    Row("p09", experts_over(1, 1, RANKS, 4)),
    Row("p12", PP2),
    Row("saved", PP4),
    Row("saved", Layout(2, 1, RANKS)),
    Row("saved", PP4, NEW_RATE),
    Row("lr_mult", PP4, alone=True),
    Row("experts", experts_over(1, 2, RANKS, 2)),
    Row("experts", experts_over(1, 1, RANKS, 2)),
    Row("beside Lion", PP2),
    Row("beside Lion", TP2),
    Row("decoupled", PP4, ("--decoupled-lr", "5e-4")),
]


def turn_of(folder: Path, row: Row, *, stock: bool) -> Turn:
    source = SOURCES[row.source]
    load = fixture_named(source.fixture).run if source.fixture else folder / row.source / "checkpoints"
    name = f"{row} by {'stock' if stock else 'policy'}"
    sequence = SEQUENCE if source.model == (*GATED_EXPERTS,) and row.layout.tensor > 1 else ()
    more = [*source.model, *sequence, *row.more]
    return Turn(
        folder / name,
        row.layout,
        more=more,
        load=load,
        until=SAVED,
        stock=stock,
        optimizer=source.optimizer,
        environment={**source.environment, **EXPLAIN},
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("policy")
    saves = [
        Turn(
            folder / name, one.layout, more=[*one.model, *one.saving], saves=True, until=SAVED,
            environment=one.environment, optimizer=one.optimizer,
        )
        for name, one in SOURCES.items() if not one.fixture
    ]  # fmt: skip
    loads = [
        turn_of(folder, row, stock=stock)
        for stock in (False, True)
        for row in (*ROWS, *SHIFTED)
        if not (stock and row.alone)
    ]
    assert len({str(row) for row in ROWS}) == len(ROWS)
    found = run_in_turn(folder, [*saves, *loads], PLUGINS)
    for row in (row for row in ROWS if row.alone):
        name, load = f"{row} by stock", folder / row.source / "checkpoints"
        found[name] = run_job(
            folder / name, row.layout, more=[*SOURCES[row.source].model, *row.more], load=load, environment=OFF
        )
    return found


def truth_of(results: Results, row: Row) -> dict[str, torch.Tensor]:
    source = SOURCES[row.source]
    return dict(fixture_named(source.fixture).truth if source.fixture else assemble(results.job(row.source).at_save))


def ends_in_that_state(results: Results, row: Row, name: str) -> bool:
    if results[name].returncode != 0:
        return False
    dump = results.folder(str(ROWS[0]) + " by policy").parent / name / "dump" / "after_load"
    return differing(truth_of(results, row), assemble(dump)) == []


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_stock_succeeds_where_the_policy_chooses_it(results: Results, row: Row) -> None:
    output = results[f"{row} by policy"].output
    assert results[f"{row} by policy"].returncode == 0, output[-3000:]
    decided = [line for line in output.splitlines() if STOCK in line or PLUGIN in line]
    assert len(decided) == 1, decided
    assert ends_in_that_state(results, row, f"{row} by policy")
    stock_can = ends_in_that_state(results, row, f"{row} by stock")
    assert stock_can or PLUGIN in decided[0] or WITHOUT_RANDOM_STATES in decided[0], decided[0]


@pytest.mark.parametrize("row", SHIFTED, ids=str)
def test_shifted_masters_are_refused(results: Results, row: Row) -> None:
    """It shows once stock has loaded it; here elements are lost, so that only a refusal is right."""
    by_policy = results[f"{row} by policy"]
    assert by_policy.returncode != 0
    assert "wrote this fully_reshardable optimizer state shifted" in by_policy.output
    assert not ends_in_that_state(results, row, f"{row} by stock")


@pytest.mark.parametrize("row", [one for one in (*ROWS, *SHIFTED) if SOURCES[one.source].fixture], ids=str)
def test_a_rehearsal_ends_as_these_jobs_do(row: Row) -> None:
    """The tests above show that jobs succeed, or are refused in these words; it needs no job of its own."""
    found = rehearsal_of_resume(fixture_named(SOURCES[row.source].fixture).run, row.layout)
    assert found.will_succeed == (row not in SHIFTED), found.refusal
    assert found.will_succeed or "wrote this fully_reshardable optimizer state shifted" in str(found.refusal)


def test_both_decisions_are_among_them(results: Results) -> None:
    outputs = [results[f"{row} by policy"].output for row in ROWS]
    assert any(STOCK in output for output in outputs)
    assert any(PLUGIN in output for output in outputs)


LOADS = [
    ("pp4", 1, 4), ("pp4", 2, 2), ("pp4", 4, 1), ("verl", 2, 2), ("verl", 1, 4), ("root", 2, 2), ("root", 1, 4),
    ("lr_mult", 4, 1), ("decoupled", 4, 1), ("decoupled", 1, 4), ("random", 2, 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """The same of a loop on Megatron Core."""
    found, script = Programs(tmp_path_factory.mktemp("loops")), RANK_SCRIPTS / "sixty_lines.py"
    ways = {"pp4": ("together", 1, 4), "verl": ("verl", 2, 2), "root": ("root", 2, 2)}
    ways |= {"lr_mult": ("together", 4, 1), "decoupled": ("together", 4, 1), "random": ("together", 2, 1)}
    for name, (way, tensor, pipeline) in ways.items():
        found.add(name, script, tensor, pipeline, "none", found.place(name), way, name)
    for stock in (False, True):
        for name, tensor, pipeline in LOADS:
            load = (script, tensor, pipeline, found.place(name), "none", ways[name][0], name)
            found.add(f"{name} {tensor} {pipeline} {stock}", *load, stock=stock)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in EXPLAIN.items():
            patch.setenv(variable, value)
        found.run()
    yield found


@pytest.mark.parametrize(("name", "tensor", "pipeline"), LOADS)
def test_stock_succeeds_where_the_policy_chooses_it_in_other_loops(
    programs: Programs, name: str, tensor: int, pipeline: int
) -> None:
    key = f"{name} {tensor} {pipeline}"
    expected = assemble(programs.dump(name))
    assert differing(expected, assemble(programs.dump(f"{key} False"))) == []
    by_stock = programs.folder / "dumps" / f"{key} True"
    stock_can = programs.ended[f"{key} True"] == {"done"} and differing(expected, assemble(by_stock)) == []
    decided = programs.printed(f"{key} False", STOCK, PLUGIN)
    assert len(decided) == 1, decided
    omits_random_states = programs.printed(f"{key} False", "random states stay as they are") != []
    assert omits_random_states == (name == "random")
    assert stock_can or PLUGIN in decided[0] or omits_random_states, decided[0]
    assert not (stock_can and omits_random_states)
