"""Test which iteration a resume takes if the newest is damaged, in genuine Megatron-LM 0.19.2 on two ranks."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble

from tests.harness.cases import Case, Outcomes, load_all
from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import Job, copy_of, differing
from tests.harness.layouts import Layout

TRACKER = "latest_checkpointed_iteration.txt"
ALLOWED = {"MCORE_CKPT_EXT_FALLBACK": "1"}


def newest(run: Path) -> Path:
    return run / "iter_0000008"


def without(name: str) -> Callable[[Path], None]:
    return lambda run: (newest(run) / name).unlink()


def cut_off(run: Path) -> None:
    path = max(newest(run).glob("*.distcp"))
    os.truncate(path, path.stat().st_size - 1)


def emptied_tracker(run: Path) -> None:
    (run / TRACKER).write_text("")


def behind(run: Path) -> None:
    """Killed while iteration 8 was being saved: the tracker names 4."""
    without("metadata.json")(run)
    (run / TRACKER).write_text("4")


DAMAGES = {
    "no metadata.json": without("metadata.json"),
    "no index": without(".metadata"),
    "a file is missing": without("__0_0.distcp"),
    "a file is cut off": cut_off,
}
OTHERS = {"behind": behind, "an empty tracker": emptied_tracker, "intact": lambda run: None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def outcomes(folder: Path, gpt: Job) -> Outcomes:
    """Each damage with and without leave to fall back, in one launch."""
    cases = []
    for number, (name, damage) in enumerate({**DAMAGES, **OTHERS}.items()):
        run = copy_of(gpt.run, folder / str(number))
        copy_of(gpt.run, folder / f"{number}-newer").joinpath("iter_0000004").rename(newest(run))
        (run / TRACKER).write_text("8")
        damage(run)
        cases.append(Case(name, run))
        cases.append(Case(f"{name}, allowed", run, environment=ALLOWED, dump=folder / f"dump-{number}"))
    legacy = fixture_named("p08b").copy_to(folder / "legacy").run
    copy_of(legacy, folder / "legacy-newer").joinpath("iter_0000004").rename(newest(legacy))
    (legacy / TRACKER).write_text("8")
    shutil.rmtree(newest(legacy) / "mp_rank_00_003")
    cases.append(Case("legacy", legacy, {"ckpt_format": "torch"}))
    cases.append(Case("legacy, allowed", legacy, {"ckpt_format": "torch"}, ALLOWED, dump=folder / "dump-legacy"))
    wanted = folder / "0"
    blind = {f"rank {rank} sees nothing": {"TEST_SEES_NOTHING": rank} for rank in ("0", "1")}
    cases.extend(Case(name, gpt.run, environment=environment) for name, environment in blind.items())
    cases.append(Case("named", wanted, {"ckpt_step": 8, "ckpt_ext_fallback": True}))
    return load_all(folder / "job", Layout(2, 1, 2), cases)


@pytest.mark.parametrize("damage", [*DAMAGES, "legacy"])
def test_it_is_refused_and_the_iteration_that_would_do_is_named(damage: str, outcomes: Outcomes) -> None:
    for rank in outcomes[damage]:
        assert re.search(r"is not complete.*iteration 4 is complete: --ckpt-step 4", rank["error"], re.DOTALL)
        assert "--ckpt-ext-fallback" in rank["error"]
        assert rank["after"] == rank["before"]


def test_a_damaged_legacy_checkpoint_is_replaced_by_an_older_one(outcomes: Outcomes, folder: Path) -> None:
    assert [(rank["error"], rank["iteration"]) for rank in outcomes["legacy, allowed"]] == [(None, 4)] * 2
    assert "resuming from iteration 4 instead" in outcomes["legacy, allowed"][0]["lines"][0]
    assert differing(fixture_named("p08b").truth, assemble(folder / "dump-legacy")) == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_with_leave_the_newest_whole_one_is_taken(damage: str, outcomes: Outcomes, folder: Path, gpt: Job) -> None:
    for rank in outcomes[f"{damage}, allowed"]:
        assert (rank["error"], rank["iteration"]) == (None, 4)
    lines = outcomes[f"{damage}, allowed"][0]["lines"]
    assert [line for line in lines if "is not complete" in line] == lines[:1]
    assert lines[0].endswith("resuming from iteration 4 instead")
    number = list(DAMAGES).index(damage)
    assert differing(assemble(gpt.at_save), assemble(folder / f"dump-{number}")) == []


@pytest.mark.parametrize("blind", [0, 1])
def test_no_rank_waits_for_one_that_sees_no_checkpoint(blind: int, outcomes: Outcomes) -> None:
    for rank in outcomes[f"rank {blind} sees nothing"]:
        assert f"no {TRACKER} on rank {blind};" in rank["error"]
        assert rank["after"] == rank["before"]


def test_an_empty_tracker_is_as_good_as_a_damaged_checkpoint(outcomes: Outcomes) -> None:
    """Megatron truncates it before it writes it; the newest iteration itself is whole here."""
    for rank in outcomes["an empty tracker"]:
        assert "iteration 8 is complete: writing 8 into the tracker file takes it" in rank["error"]
    assert [rank["error"] for rank in outcomes["an empty tracker, allowed"]] == [None, None]
    assert "resuming from iteration 8 instead" in outcomes["an empty tracker, allowed"][0]["lines"][0]


def test_the_flag_gives_leave_too_and_a_named_iteration_is_looked_at(outcomes: Outcomes) -> None:
    assert [(rank["error"], rank["iteration"]) for rank in outcomes["named"]] == [(None, 4)] * 2


@pytest.mark.parametrize("name", ["behind", "behind, allowed"])
def test_an_unfinished_save_is_reported_and_skipped(name: str, outcomes: Outcomes) -> None:
    for rank in outcomes[name]:
        assert (rank["error"], rank["iteration"]) == (None, 4)
        assert "iteration 8 was not finished; resuming from iteration 4, which is complete" in rank["lines"]


@pytest.mark.parametrize("name", ["intact", "intact, allowed"])
def test_a_whole_one_is_taken_without_a_word_of_this(name: str, outcomes: Outcomes) -> None:
    for rank in outcomes[name]:
        assert rank["error"] is None
        assert [line for line in rank["lines"] if "whole" in line] == []
