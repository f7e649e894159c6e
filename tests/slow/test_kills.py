"""Test thirty jobs killed at random moments around three saves; run by name: `pytest tests/slow`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from megatron_on_cpu import launch

from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.iteration_health import iteration_health_of, problems_of
from tests.harness.cases import Case, Outcomes, load_all
from tests.harness.jobs import LAST
from tests.harness.layouts import Layout
from tests.harness.saving import RANKS, durable_lines, iterations_in, run_saving, tracked

KILLS = 30
SAVES = (2, 3, 4)
# What a save takes here, from its scheduling to its being complete, and a little more: seconds.
WINDOW = 3.0


def trouble_of(number: int) -> dict[int, dict[str, object]]:
    """The kill of a run, which its number decides: who, at which save, how long after its writer had its order.

    The first save is waited for, so that there is something to lose.
    """
    chance = random.Random(number)
    whom = ("rank", "writer", "all")[number % 3]
    what = f"kill {whom} {chance.uniform(0, WINDOW):.3f}"
    first = {"ranks": [], "what": "", "settle": True}
    return {1: first, chance.choice(SAVES): {"ranks": [chance.randrange(RANKS)], "what": what}}


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    result = run_saving(folder, LAST)
    assert result.returncode == 0, result.output[-6000:]
    return folder / "checkpoints"


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, launch.RunResult]]:
    """The run folder and the result of each job, after the kill."""
    base = tmp_path_factory.mktemp("killed")
    found = {}
    for number in range(KILLS):
        result = run_saving(base / str(number), LAST, trouble=trouble_of(number))
        found[number] = base / str(number) / "checkpoints", result
    return found


@pytest.fixture(scope="session")
def outcomes(killed: dict[int, tuple[Path, launch.RunResult]], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Genuine Megatron resumes each of them."""
    cases = [Case(str(number), run) for number, (run, _) in killed.items()]
    return load_all(tmp_path_factory.mktemp("resumed"), Layout(1, 2, RANKS), cases)


@pytest.mark.parametrize("number", range(KILLS))
def test_resuming_finds_a_whole_checkpoint(
    number: int, killed: dict[int, tuple[Path, launch.RunResult]], outcomes: Outcomes, undisturbed: Path
) -> None:
    """What was said to be complete before the kill is there, or something newer; all that passes for whole is right."""
    run, result = killed[number]
    assert result.returncode != launch.TIMED_OUT
    standing = iteration_health_of(run)
    assert standing is not None
    assert standing.problems == ()
    assert tracked(run) >= max(durable_lines(result.output))
    assert [rank["error"] for rank in outcomes[str(number)]] == [None] * RANKS
    assert [rank["iteration"] for rank in outcomes[str(number)]] == [tracked(run)] * RANKS
    whole = [iteration for iteration in iterations_in(run) if not problems_of(run / f"iter_{iteration:07d}")]
    assert tracked(run) in whole
    for iteration in whole:
        folders = [place / f"iter_{iteration:07d}" for place in (run, undisturbed)]
        assert compare(*folders).equal, iteration
