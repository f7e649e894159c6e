"""Test the states of a save without Megatron: every transition, and every failure at every point."""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from mcore_ckpt_ext.errors import SaveFailedError
from mcore_ckpt_ext.megatron.live.sidecar_writer import PendingSidecar
from mcore_ckpt_ext.megatron.saving.atomic_write import Disk
from mcore_ckpt_ext.megatron.saving.coordinator import Coordinator
from mcore_ckpt_ext.megatron.saving.publisher import Publisher
from mcore_ckpt_ext.megatron.saving.save import TRANSITIONS, Point, Save, State
from tests.megatron.saving.simulated import (
    FAULTS,
    HARMLESS,
    NOT_OF_SYNCHRONOUS,
    OF_RANK_0,
    TRACKER,
    Job,
    Order,
    Stuck,
)

RANKS = 3
LIVES = [
    (State.WRITING, State.FINALIZED, State.PUBLISHING, State.COMMITTED),
    (State.WRITING, State.FINALIZED, State.PUBLISHING, State.FAILED),
    (State.WRITING, State.FAILED),
    (State.FAILED,),
]


def save_of(run: Path) -> Save:
    return Save(
        2, run / "iter_0000002", run / TRACKER, "2", True, sidecar=PendingSidecar(lambda: None, lambda saved: "")
    )


@pytest.mark.parametrize("life", LIVES)
def test_the_lives_of_a_save(life: tuple[State, ...], tmp_path: Path) -> None:
    save = save_of(tmp_path)
    for state in life:
        save.become(state)
    assert save.state not in {before for before, _ in TRANSITIONS}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_no_save_goes_where_none_goes(before: State, after: State, tmp_path: Path) -> None:
    steps = {step for life in LIVES for step in itertools.pairwise((State.PLANNED, *life))}
    save = save_of(tmp_path)
    save.state = before
    if (before, after) in steps:
        save.become(after)
        assert save.state is after
    else:
        with pytest.raises(RuntimeError, match=f"a save that is {before.value} cannot be {after.value}"):
            save.become(after)


def assert_sound(job: Job) -> None:
    """No rank waited in vain, all know the same, and what is there is whole."""
    assert job.meeting.stuck is None
    assert not any(isinstance(rank.raised, Stuck) for rank in job.members)
    assert job.broken == []
    for rank in job.members:
        assert job.states(rank.number) == job.states()
        assert type(rank.raised) is type(job.members[0].raised)
        assert str(rank.raised) == str(job.members[0].raised)
    for folder in job.folders:
        assert job.is_whole(folder) or not (folder / "metadata.json").exists()


def assert_kept(job: Job) -> None:
    """In a job that has come to its end: each save is told and there, or failed and not there; nothing else is left."""
    assert set(job.states()) <= {State.COMMITTED, State.FAILED}
    for order, state in zip(job.orders, job.states(), strict=True):
        folder = job.folder_of(order.iteration)
        assert job.is_whole(folder) == (state is State.COMMITTED)
        assert not folder.exists() or state is State.COMMITTED or order.has("resist")
        told = [line for line in job.members[0].said if line.startswith(f"iteration {order.iteration} is complete")]
        assert len(told) == (state is State.COMMITTED)
    kept = [order.iteration for order, state in zip(job.orders, job.states(), strict=True) if state is State.COMMITTED]
    tracker = job.run / TRACKER
    assert (int(tracker.read_text()) if tracker.exists() else None) == (kept[-1] if kept else None)
    assert {path.name for path in job.run.iterdir() if not path.name.startswith("iter_")} <= {TRACKER}


def test_successful_saves(tmp_path: Path) -> None:
    orders = [Order(2, writing=(0, 3, 1), publishing=2, steps=5), Order(4, asynchronous=False), Order(6)]
    job = Job(tmp_path, orders).train()
    assert_sound(job)
    assert_kept(job)
    assert job.states() == [State.COMMITTED] * 3


def faults() -> list[tuple[str, int, bool]]:
    """Every fault on every rank that may have it, in the background and not."""
    found = []
    for fault, rank, asynchronous in itertools.product(FAULTS, range(RANKS), (True, False)):
        if (fault in OF_RANK_0 and rank) or (fault in NOT_OF_SYNCHRONOUS and not asynchronous):
            continue
        found.append((fault, rank, asynchronous))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(("fault", "rank", "asynchronous"), faults())
def test_one_failure_costs_one_save(fault: str, rank: int, asynchronous: bool, is_old: bool, tmp_path: Path) -> None:
    """The one before is kept, and the one after the next, too: a failed publication is told where the next begins."""
    orders = [
        Order(2),
        Order(4, asynchronous, frozenset({(fault, rank)}), writing=(1, 0, 2), publishing=1, steps=6),
        Order(6),
        Order(8),
    ]
    job = Job(tmp_path, orders, is_old=is_old).train()
    assert_sound(job)
    assert_kept(job)
    is_late = asynchronous and fault in ("settle", "publish", "track")
    expected = [
        State.COMMITTED,
        State.COMMITTED if fault in HARMLESS else State.FAILED,
        State.FAILED if is_late else State.COMMITTED,
    ]
    assert job.states() == [*expected, State.COMMITTED]


def test_a_committed_save_outlives_the_failure_of_the_one_before(tmp_path: Path) -> None:
    """Both end while `save_checkpoint` waits for the second."""
    orders = [Order(2, faults=frozenset({("settle", 0)}), steps=0), Order(4, waits=True), Order(6)]
    job = Job(tmp_path, orders, goes_on=False).train()
    assert_sound(job)
    assert job.states() == [State.FAILED, State.COMMITTED]
    assert "iteration 2 was not saved" in str(job.members[0].raised)
    assert job.is_whole(job.folder_of(4)) and not job.folder_of(2).exists()
    assert (job.run / TRACKER).read_text() == "4"


@pytest.mark.parametrize(("fault", "rank", "asynchronous"), faults())
def test_one_failure_stops_every_rank_unless_the_user_says_otherwise(
    fault: str, rank: int, asynchronous: bool, tmp_path: Path
) -> None:
    orders = [Order(2), Order(4, asynchronous, frozenset({(fault, rank)}), steps=3), Order(6)]
    job = Job(tmp_path, orders, goes_on=False).train()
    assert_sound(job)
    is_raised = fault not in HARMLESS
    assert isinstance(job.members[0].raised, SaveFailedError) == is_raised
    assert not is_raised or "--ckpt-ext-on-save-failure continue" in str(job.members[0].raised)
    assert (tmp_path / TRACKER).read_text() == ("2" if is_raised else "6")


@pytest.mark.parametrize(
    ("fault", "rank", "said"),
    [
        ("prepare", 0, "iteration 2 cannot be saved to .*\n  rank 0: OSError: .*prepare"),
        ("plan", 0, "iteration 2 was not saved: rank 0: no plan"),
        ("writer", 1, "iteration 2 was not saved:\n  rank 1: its writer was killed"),
        (
            "result",
            2,
            r"iteration 2 was not saved:\n  rank 0: rank 2: worker failure\n(.*\n)+.*ValueError: invalid literal",
        ),
        ("index", 0, "iteration 2 was not saved:\n  rank 0: OSError: no space left"),
        ("lose", 1, r"iteration 2 was not saved:\n  rank 0: __1_0\.distcp: it does not exist"),
        ("step", 2, "iteration 2 was not saved:\n  rank 2: ValueError: this rank's step"),
        ("config", 0, "iteration 2 was not saved:\n  rank 0: OSError: no space left for metadata.json"),
        ("track", 0, "iteration 2 was not saved: IsADirectoryError"),
    ],
)
def test_the_cause_is_reported_on_every_rank(fault: str, rank: int, said: str, tmp_path: Path) -> None:
    job = Job(tmp_path, [Order(2, faults=frozenset({(fault, rank)}))], goes_on=False).train()
    for member in job.members:
        with pytest.raises(SaveFailedError, match=said):
            raise member.raised or AssertionError


@pytest.mark.parametrize("fault", ["prepare", "plan"])
def test_a_full_disk_names_the_save_that_filled_it_and_removes_its_part(fault: str, tmp_path: Path) -> None:
    """The next save finds the disk full before all ranks have finished the one that failed."""
    failing = Order(4, faults=frozenset({("result", 1)}), writing=(9, 0, 9))
    job = Job(tmp_path, [Order(2), failing, Order(6, faults=frozenset({(fault, 0)}))], goes_on=False).train()
    assert_sound(job)
    assert job.states() == [State.COMMITTED, State.FAILED, State.FAILED]
    assert [folder.name for folder in job.folders] == ["iter_0000002"]
    assert (tmp_path / TRACKER).read_text() == "2"
    said = (
        r"iteration 4 was not saved:\n  rank 1: its writer failed\n(.*\n)+.*ValueError: invalid literal.*\niteration 6 "
    )
    for member in job.members:
        with pytest.raises(SaveFailedError, match=said):
            raise member.raised or AssertionError


def test_a_save_without_a_report_stays_when_the_next_has_no_place(tmp_path: Path) -> None:
    """Its writers may still complete it."""
    job = Job(tmp_path, [Order(2, writing=(9, 0, 9)), Order(4, faults=frozenset({("prepare", 0)}))], goes_on=False)
    assert_sound(job.train())
    assert job.states() == [State.WRITING, State.FAILED]
    assert [folder.name for folder in job.folders] == ["iter_0000002"]
    assert "iteration 2" not in str(job.members[0].raised)


def test_each_of_two_failed_saves_is_named_where_training_goes_on(tmp_path: Path) -> None:
    failing = Order(2, faults=frozenset({("result", 1)}), writing=(2, 0, 2))
    job = Job(tmp_path, [failing, Order(4, faults=frozenset({("prepare", 0)}), steps=4), Order(6)]).train()
    assert_sound(job)
    assert_kept(job)
    named = [line.split(" ", 2)[1] for line in job.members[0].said]
    assert named == ["4", "2", "6"]


def test_an_older_save_of_the_same_iteration_is_withdrawn_first(tmp_path: Path) -> None:
    Job(tmp_path, [Order(2), Order(4)]).train()
    job = Job(tmp_path, [Order(4, faults=frozenset({("writer", 1)}))]).train()
    assert_sound(job)
    assert [folder.name for folder in job.folders] == ["iter_0000002"]
    assert (tmp_path / TRACKER).read_text() == "2"


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_gets_no_place_leaves_what_another_job_saved_under_its_number(
    asynchronous: bool, goes_on: bool, tmp_path: Path
) -> None:
    Job(tmp_path, [Order(2), Order(4)]).train()
    (tmp_path / TRACKER).write_text("2")  # the job was rolled back
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    job = Job(tmp_path, [Order(4, asynchronous, frozenset({("prepare", 0)}))], goes_on=goes_on).train()
    assert_sound(job)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_save_that_fails_for_the_one_before_leaves_what_lies_in_its_place(tmp_path: Path) -> None:
    Job(tmp_path, [Order(2), Order(6)]).train()
    (tmp_path / TRACKER).write_text("2")
    job = Job(tmp_path, [Order(4, faults=frozenset({("settle", 0)}), publishing=9), Order(6)]).train()
    assert job.states() == [State.FAILED, State.FAILED]
    assert [folder.name for folder in job.folders] == ["iter_0000002", "iter_0000006"]
    assert (job.folder_of(6) / "metadata.json").exists()


def test_training_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    """Its line is said once it is kept, several steps later; and at the end it is waited for."""
    job = Job(tmp_path, [Order(2, publishing=4, steps=3), Order(4, publishing=100)]).train()
    assert job.states() == [State.COMMITTED] * 2
    assert len(job.members[0].said) == 2


some_faults = some.frozensets(
    some.tuples(some.sampled_from(FAULTS), some.integers(0, RANKS - 1)).map(
        lambda found: (found[0], 0) if found[0] in OF_RANK_0 else found
    ),
    max_size=3,
)


@some.composite
def some_orders(draw: some.DrawFn) -> list[Order]:
    """A few saves, most of them with nothing wrong, some begun before the last one is written."""
    orders, asynchronous = [], draw(some.booleans())  # a job does the one or the other
    for number in range(draw(some.integers(1, 5))):
        found = draw(some.one_of(some.just(frozenset[tuple[str, int]]()), some_faults))
        allowed = frozenset(fault for fault in found if asynchronous or fault[0] not in NOT_OF_SYNCHRONOUS)
        writing = tuple(draw(some.integers(0, 3)) for _ in range(RANKS))
        publishing, steps, waits = draw(some.integers(0, 3)), draw(some.integers(0, 4)), draw(some.booleans())
        orders.append(Order(2 * (number + 1), asynchronous, allowed, writing, publishing, steps, waits))
    return orders


@pytest.mark.thorough
@settings(max_examples=200)
@given(orders=some_orders(), goes_on=some.booleans(), ranks=some.integers(1, RANKS))
def test_whatever_happens_a_save_is_whole_or_not_there(orders: list[Order], goes_on: bool, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), orders, ranks, goes_on).train()
        assert_sound(job)
        if job.members[0].raised is None:
            assert_kept(job)
        if not any(order.faults for order in orders):
            assert job.states() == [State.COMMITTED] * len(orders)


class OneRank:
    """The only rank of a job."""

    is_first = True

    def agree_on(self, point: Point, problem: str | None) -> str | None:
        return None if problem is None else f"rank 0: {problem}"

    def barrier(self) -> None:
        """Nobody waits."""


def test_a_synchronous_save_says_why_its_writer_failed(tmp_path: Path) -> None:
    """Megatron's writer logs the error, and raises an assertion that has only its class."""

    def begin(work: Callable[[], str | None]) -> Future[str | None]:
        raise AssertionError("nothing is committed")

    publisher = Publisher(Disk(), begin, lambda: 0.0, lambda line: None, lambda line: None)
    coordinator = Coordinator(OneRank(), publisher, lambda line: None, lambda: False)

    def fail(save: Save | None, problems: list[str]) -> None:
        logging.getLogger("megatron.core.dist_checkpointing.strategies.filesystem_async").error(
            "Local worker 0 encountered an error: [Errno 28] No space left on device"
        )
        raise AssertionError(OSError)

    save = save_of(tmp_path)
    save.asynchronous = False
    with pytest.raises(SaveFailedError, match="No space left on device"):
        coordinator.run(save, lambda redirected: coordinator.write_index(fail))
    assert save.state is State.FAILED
    assert save.report.read() == ""
