"""Test a changed learning rate in a resume that this package fills: it applies as the flags request.

The references are two jobs by stock Megatron: an uninterrupted one, and one that had the new learning rate from the
start. Stock itself cannot resume so: 0.19 and 0.20 do not find their own parameter groups (KeyError).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_on_cpu.dump_optimizer import parameter_settings

from mcore_ckpt_ext import TorchDist, convert
from tests.harness.checkouts import EITHER, checkout_job, full_version, with_another_release
from tests.harness.damage import without_digests
from tests.harness.jobs import OFF, SAVED, Job, resume, run_job, train_and_save
from tests.harness.layouts import Layout
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

ONE = Layout(1, 1, 1)
NEW = ("--lr", "5e-4", "--min-lr", "5e-5")
# Another layout of the buffers, so that the package fills the optimizer.
BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "3000")
OVERRIDE, KEEP = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"


def rate(job: Job) -> float:
    """The learning rate of the first iteration after the checkpoint."""
    record = json.loads((job.folder / "losses.json").read_text())
    return record[str(SAVED + 1)]["learning_rate"]


def rates(folder: Path, *changed: str, **how: Any) -> tuple[float, float, dict[str, float]]:
    """That of the job that never stopped, with the old and with the new learning rate; and after a resume, by flag.

    `changed`: further flags of the resume.
    """
    options = {"until": SAVED + 1, "environment": OFF, **how}
    saved = train_and_save(folder / "saved", ONE, **options)
    other = train_and_save(folder / "other", ONE, more=NEW, **options)
    resumed = {
        flag: rate(resume(folder / flag.strip("-"), ONE, saved.run, more=[*NEW, *changed, flag], **how))
        for flag in (OVERRIDE, KEEP)
    }
    return rate(saved), rate(other), resumed


@pytest.mark.parametrize("changed", [BUCKETS, ()], ids=["another layout", "the same layout"])
def test_it_counts_where_it_overrides_and_only_there(changed: tuple[str, ...], tmp_path: Path) -> None:
    old, new, resumed = rates(tmp_path, *changed)
    assert old == pytest.approx(2 * new)
    assert resumed == {OVERRIDE: new, KEEP: old}


def test_rates_that_belong_to_some_parameters_stay_theirs(tmp_path: Path) -> None:
    """Since 0.17 the groups of decoupled rates differ from the others in their bounds alone."""
    decoupled = ("--decoupled-lr", "5e-4", "--decoupled-min-lr", "5e-5")
    until = SAVED + 2  # the first loss behind a step of the resumed job
    saved = train_and_save(tmp_path / "saved", ONE, more=decoupled, until=until, environment=OFF)
    resumed = resume(tmp_path / "resumed", ONE, saved.run, more=[*decoupled, *BUCKETS, OVERRIDE], until=until)
    assert "optimizer resumed from" in resumed.output
    assert resumed.losses == {step: saved.losses[step] for step in (SAVED + 1, until)}


DECOUPLED = ("--decoupled-lr", "5e-4", "--decoupled-min-lr", "5e-5")
OTHERS = ("--decoupled-lr", "2e-4", "--decoupled-min-lr", "2e-5")
NEW_RATES = {"lr": (*NEW, *DECOUPLED), "decoupled": OTHERS, "both": (*NEW, *OTHERS), "no longer decoupled": NEW}
SCHEDULED = ("lr", "max_lr", "min_lr", "weight_decay")


def scheduled(job_dump: Path) -> dict[str, tuple[float, ...]]:
    """What the scheduler owns, of every parameter's group."""
    return {name: tuple(one.get(key) for key in SCHEDULED) for name, one in parameter_settings(job_dump).items()}


@pytest.fixture(scope="module", params=EITHER)
def decoupled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of each new rate, a job that had it from the start, and those that resume with it, by flag and layout."""
    folder, of_checkout = tmp_path_factory.mktemp("decoupled"), request.param
    at_once = {"saves": True, "until": SAVED}
    load = folder / "saved" / "checkpoints"
    turns = [Turn(folder / "saved", ONE, more=DECOUPLED, **at_once)]
    for name, new in NEW_RATES.items():
        turns.append(Turn(folder / name, ONE, more=new, **at_once))
        for layout, changed in (("same", ()), ("moved", BUCKETS)):
            for flag in (OVERRIDE, KEEP):
                more = [*new, *changed, flag]
                turns.append(Turn(folder / f"{name} {layout} {flag}", ONE, load=load, more=more))
    return run_in_turn(folder, turns, of_checkout=of_checkout)


@pytest.mark.parametrize("layout", ["same", "moved"])
@pytest.mark.parametrize("new", NEW_RATES)
def test_new_rates_with_decoupled_ones(new: str, layout: str, decoupled: Results) -> None:
    """Groups that are otherwise the same differ in their rates, and in whether these are the job's."""
    if decoupled.megatron == "0.16" and (layout == "same" or new == "no longer decoupled"):
        pytest.skip("groups keep their bounds, or are left to stock")
    overridden = decoupled.job(f"{new} {layout} {OVERRIDE}")
    stored_counts = decoupled.megatron == "0.16"
    assert "optimizer resumed from" in overridden.output
    assert scheduled(overridden.at_load) == scheduled(decoupled.job("saved" if stored_counts else new).at_save)
    if new != "no longer decoupled":
        assert scheduled(decoupled.job(f"{new} {layout} {KEEP}").at_load) == scheduled(decoupled.job("saved").at_save)


DECAY = ("--start-weight-decay", "0.01", "--end-weight-decay", "0.1", "--weight-decay-incr-style", "linear")
OTHER_DECAY = ("--start-weight-decay", "0.2", "--end-weight-decay", "0.4", "--weight-decay-incr-style", "cosine")
LONGER = ("--lr-warmup-iters", "5", "--lr-decay-iters", "50", "--lr-decay-style", "cosine")
CHANGES = {
    "constant decay": (("--weight-decay", "0.05"), ("--weight-decay", "0.5")),
    "ramps": (DECAY, OTHER_DECAY),
    "a ramp from none": (("--weight-decay", "0.05"), DECAY),
    "warm-up and style": ((), LONGER),
}


@pytest.fixture(scope="module", params=EITHER)
def changed_schedules(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of each change, the job that never had it, the one that always had it, and those that resume with it."""
    folder = tmp_path_factory.mktemp("schedules")
    turns = []
    for name, (before, after) in CHANGES.items():
        for when, flags in (("before", before), ("after", after)):
            turns.append(Turn(folder / f"{name}, {when}", ONE, saves=True, until=SAVED, more=flags))
        load = folder / f"{name}, before" / "checkpoints"
        turns += [
            Turn(folder / f"{name} {flag}", ONE, load=load, more=[*after, *BUCKETS, flag]) for flag in (OVERRIDE, KEEP)
        ]
    return run_in_turn(folder, turns, of_checkout=request.param)


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_step_has_the_schedule_that_the_flag_selects(change: str, changed_schedules: Results) -> None:
    """Both ramps, before a step is made; stock makes the first one with the command line's weight decay."""
    for flag, when in ((OVERRIDE, "after"), (KEEP, "before")):
        resumed = changed_schedules.job(f"{change} {flag}")
        assert "optimizer resumed from" in resumed.output
        assert scheduled(resumed.at_load) == scheduled(changed_schedules.job(f"{change}, {when}").at_save), flag


@pytest.mark.parametrize("changed", [BUCKETS, ()], ids=["another layout", "the same layout"])
def test_rates_of_a_width_stay_theirs(changed: tuple[str, ...], tmp_path: Path) -> None:
    """Of --use-mup: its groups differ in their bounds, and in what Adam's epsilon is."""
    width = ("--use-mup", "--mup-base-hidden-size", "16")
    options = {"until": SAVED + 1, "environment": OFF}
    saved = train_and_save(tmp_path / "saved", ONE, more=width, **options)
    other = train_and_save(tmp_path / "other", ONE, more=[*width, *NEW], **options)
    resumed = resume(tmp_path / "resumed", ONE, saved.run, more=[*width, *NEW, *changed, OVERRIDE])
    assert "optimizer resumed from" in resumed.output

    def rates_in(job: Job) -> set[tuple[float, float]]:
        record = parameter_settings(job.at_save if job is other else job.at_load)
        return {(one["max_lr"], one["min_lr"]) for one in record.values()}

    assert rates_in(resumed) == rates_in(other)
    assert len(rates_in(other)) > 1


def test_groups_that_kept_the_bounds_of_before(tmp_path: Path) -> None:
    """As a job of before 0.19 keeps them that went on with new rates: stock 0.19 does not find its groups."""
    saved = train_and_save(tmp_path / "saved", ONE, environment=OFF)
    kept = tmp_path / "kept"
    convert(saved.run, kept, TorchDist(megatron_version="0.16.1"))
    common = next(kept.glob("*/common.pt"), None) or kept / "common.pt"
    without_digests(common.parent)
    state = torch.load(common, weights_only=False)
    for group in state["optimizer"]["optimizer"]["param_groups"]:
        group["max_lr"] = 7e-4
    torch.save(state, without_digests(common.parent) / common.name)
    assert run_job(tmp_path / "stock", ONE, load=kept, environment=OFF).returncode != 0
    assert "optimizer resumed from" in resume(tmp_path / "resumed", ONE, kept).output


def test_the_schedule_goes_on_where_it_stood(tmp_path: Path) -> None:
    """It once began anew, and so has counted fewer samples than were consumed; stock leaves it there, too."""
    first = train_and_save(tmp_path / "first", ONE, environment=OFF)
    until, options = 2 * SAVED, {"more": ["--no-load-optim"], "environment": OFF}
    assert run_job(tmp_path / "anew", ONE, load=first.run, saves=True, until=until, **options).returncode == 0
    anew = tmp_path / "anew" / "checkpoints"
    (anew / "latest_checkpointed_iteration.txt").write_text(str(until))
    found = []
    for name, buckets, environment in (("stock", (), OFF), ("ours", BUCKETS, {})):
        more = [*buckets, OVERRIDE, "--train-iters", str(until + 1), "--weight-decay", "0.05"]
        run_job(tmp_path / name, ONE, load=anew, until=until + 1, more=more, environment=environment)
        record = json.loads((tmp_path / name / "losses.json").read_text())
        found.append(record[str(until + 1)]["learning_rate"])
    assert found[0] == found[1]


@with_another_release
def test_it_counts_as_in_the_checkout(tmp_path: Path) -> None:
    """Before 0.19 the stored bounds of the groups outweigh the flag, in stock Megatron and here."""
    old, new, resumed = rates(tmp_path, *BUCKETS, **checkout_job())
    counts = tuple(int(part) for part in full_version().split(".")[:2]) >= (0, 19)
    assert resumed == {OVERRIDE: new if counts else old, KEEP: old}


def test_stock_does_not_find_its_groups(tmp_path: Path) -> None:
    """Why there is no oracle that resumes."""
    saved = train_and_save(tmp_path / "saved", ONE, environment=OFF)
    result = run_job(tmp_path / "stock", ONE, load=saved.run, more=[*NEW, OVERRIDE], environment=OFF)
    assert result.returncode != 0
    assert "KeyError: (None, 0.0005, 5e-05" in result.output
