"""A job of simulated ranks that saves: a thread for each rank, a real folder, and all calls of training.

The surroundings of the coordinator are simulated: ranks, which notice immediately if one waits for another that never
arrives; Megatron, in the order of its calls; writers, which take a set time; a disk that fails.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt_ext.errors import SaveFailedError
from mcore_ckpt_ext.megatron.live.sidecar_writer import PendingSidecar
from mcore_ckpt_ext.megatron.saving.atomic_write import Disk
from mcore_ckpt_ext.megatron.saving.coordinator import Coordinator, WriterLostError
from mcore_ckpt_ext.megatron.saving.publisher import Publisher
from mcore_ckpt_ext.megatron.saving.save import Finalize, Point, Save, State, Step

TRACKER = "latest_checkpointed_iteration.txt"
OF_RANK_0 = ("prepare", "index", "config", "settle", "publish", "track", "resist")
OF_ANY_RANK = ("plan", "writer", "result", "lose", "step", "own")
FAULTS = (*OF_RANK_0, *OF_ANY_RANK)
"""What may happen to a save. The folder cannot be made; the index, the file that makes it whole; flushing, the sidecar,
the tracker; what failed cannot be removed. Planning fails on all ranks; a writer dies; it reports an error; its file is
gone; a rank's step of finalization fails; a step of the training script's own."""
NOT_OF_SYNCHRONOUS = ("writer", "config", "step", "own")  # there they are Megatron's own affair
HARMLESS = ("own", "resist")


class Stuck(BaseException):
    """A rank waits where another never comes; nothing that is simulated may catch it."""


class Meeting:
    """Where all ranks meet, or find that they never will."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.stuck: str | None = None
        self._changed = threading.Condition()
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._gone: set[int] = set()
        self._number = 0
        self._items: list[Any] = []

    def meet(self, rank: int, name: str, item: Any = None) -> list[Any]:
        """Every rank's item, once all are here."""
        with self._changed:
            self._arrived[rank] = (name, item)
            self._look()
            number = self._number
            if len(self._arrived) == self.ranks and not self.stuck:
                self._items = [self._arrived[other][1] for other in range(self.ranks)]
                self._arrived.clear()
                self._number += 1
                self._changed.notify_all()
            while self._number == number and self.stuck is None and len(self._arrived):
                self._changed.wait()
            if self.stuck:
                raise Stuck(self.stuck)
            return self._items

    def leave(self, rank: int) -> None:
        """The rank's job is at its end."""
        with self._changed:
            self._gone.add(rank)
            self._look()

    def _look(self) -> None:
        places = {name for name, _ in self._arrived.values()}
        if len(places) > 1 or (places and self._gone):
            self.stuck = self.stuck or f"{dict(self._arrived)} of {self.ranks} ranks, gone: {sorted(self._gone)}"
            self._changed.notify_all()


@dataclass(frozen=True)
class Order:
    """A save that a job is to do.

    Attributes:
        iteration: its number.
        asynchronous: whether in the background.
        faults: what happens to it, and on which rank.
        writing: after how many looks each rank's writer is done.
        publishing: after how many looks the disk has kept it.
        steps: of training that follow.
        waits: all of it is waited for within `save_checkpoint`.
    """

    iteration: int
    asynchronous: bool = True
    faults: frozenset[tuple[str, int]] = frozenset()
    writing: tuple[int, ...] = (0, 0, 0)
    publishing: int = 0
    steps: int = 1
    waits: bool = False

    def has(self, fault: str, rank: int | None = None) -> bool:
        return any(kind == fault and rank in (None, where) for kind, where in self.faults)


class FaultyDisk(Disk):
    """The real disk, which refuses where an order says so; after each change it is looked at."""

    def __init__(self, orders: Sequence[Order], changed: Callable[[], None]) -> None:
        self._orders = {f"iter_{order.iteration:07d}": order for order in orders}
        self._changed = changed

    def prepare(self, folder: Path, tracker: Path) -> None:
        self._refuse("prepare", folder)
        super().prepare(folder, tracker)
        self._changed()

    def settle(self, folder: Path) -> None:
        self._refuse("settle", folder)
        super().settle(folder)

    def publish(self, folder: Path, sidecar: str, tracker: Path | None, text: str) -> None:
        self._refuse("publish", folder)
        with self._barred(folder, tracker):
            super().publish(folder, sidecar, tracker, text)
        self._changed()

    def discard(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            if self._orders[folder.name].has("resist"):
                (folder / "metadata.json").unlink(missing_ok=True)
            else:
                super().discard([folder])
        self._changed()

    @contextlib.contextmanager
    def _barred(self, folder: Path, tracker: Path | None) -> Iterator[None]:
        if tracker is None or not self._orders[folder.name].has("track"):
            yield
            return
        bar = tracker.with_name(f"{tracker.name}.partial")
        bar.mkdir()
        try:
            yield
        finally:
            bar.rmdir()

    def _refuse(self, fault: str, folder: Path) -> None:
        if self._orders[folder.name].has(fault):
            raise OSError(28, f"no space left: {fault}")


class Later:
    """A piece of work whose end is seen after some looks, or when it is waited for."""

    def __init__(self, work: Callable[[], str | None], looks: int) -> None:
        self._work, self._looks, self._results = work, looks, list[Any]()

    def done(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def result(self) -> str | None:
        if not self._results:
            self._results.append(self._work())
        return self._results[0]


@dataclass
class Request:
    """What Megatron hands to its writers."""

    order: Order
    finalize_fns: list[Callable[[], Any]]
    looks: int
    is_watched: bool = False


@dataclass
class Rank:
    """One rank: its training, its queue of writers, its coordinator."""

    job: Job
    number: int
    saves: list[Save] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    raised: BaseException | None = None
    queue: deque[Request] = field(default_factory=deque)
    publishing: int = 0

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def meet(self, name: str, item: Any = None) -> list[Any]:
        return self.job.meeting.meet(self.number, name, item)

    # The ranks of the job, as the coordinator sees them.

    def agree_on(self, point: Point, problem: str | None) -> str | None:
        found = self.meet(point.name, problem)
        texts = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text]
        return "\n  ".join(texts) if any(text is not None for text in found) else None

    def barrier(self) -> None:
        self.meet("Megatron's barrier")

    # The writers, as the coordinator sees them.

    def take_over(self, request: Request, save: Save, finalize: Finalize) -> Request:
        if request.finalize_fns:
            index, step, config, own = request.finalize_fns
            steps = [Step(index), Step(step), Step(config, has_barrier=True), Step(own, is_of_script=True)]
            request.finalize_fns[:] = [lambda: finalize(steps)]
        return request

    @contextlib.contextmanager
    def guard_scheduling(self) -> Iterator[None]:
        yield

    ending_writers = guard_scheduling

    def are_done(self) -> bool:
        return not self.queue

    def watch_newest(self, completed: Callable[[str], str]) -> None:
        self.queue[-1].is_watched = True

    def renew(self) -> None:
        self.queue.clear()

    def drop_results(self) -> None:
        pass

    # Megatron.

    def train(self) -> None:
        """All of the job's saves, steps after each, and the end."""
        disk = FaultyDisk(self.job.orders, self.job.poll)
        start: Any = lambda work: Later(work, self.publishing)  # noqa: E731
        publisher = Publisher(disk, start, lambda: 0.0, self.said.append, self.warned.append)
        self.coordinator = Coordinator(
            self, publisher, self.said.append, lambda: self.job.goes_on, (lambda: 0.0, lambda seconds: None)
        )
        try:
            for order in self.job.orders:
                self.save(order)
                for _ in range(order.steps):
                    self.coordinator.poll(self, self.finalize_calls)
            self.coordinator.drain(self, self.finalize_calls, self.finalize_calls, ending=True)
        except (SaveFailedError, Stuck) as error:
            self.raised = error
        finally:
            publisher.finish(wait=True)  # as the interpreter does, when it ends
            self.job.meeting.leave(self.number)

    def save(self, order: Order) -> None:
        """`save_checkpoint`."""
        folder, tracker = self.job.folder_of(order.iteration), self.job.run / TRACKER
        text = str(order.iteration)
        save = Save(
            order.iteration,
            folder,
            tracker,
            text,
            order.asynchronous,
            sidecar=PendingSidecar(lambda: None, lambda saved: "{}"),
        )
        self.saves.append(save)
        self.publishing = order.publishing

        def stock(redirected: bool) -> None:
            self.meet("planning")
            if order.has("plan"):
                raise CheckpointException("planning", {rank: (ValueError("no plan"), None) for rank in (0,)})  # type: ignore[dict-item]
            named = save.scratch if redirected or not self.is_first else tracker
            steps = [self.index_step(order), self.other_step(order), self.config_step(order)]
            request = Request(order, [*steps, self.own_step(order, named)], order.writing[self.number])
            if order.asynchronous:
                self.coordinator.schedule(request, self, self.queue.append)
                if order.has("result", self.number):
                    self.write(order)  # this writer ends with an error while others still write
                if order.waits:
                    self.coordinator.drain(self, self.finalize_calls, self.finalize_calls, ending=False)
                return
            self.write(order)
            self.meet("all have written")
            for step in request.finalize_fns:
                step()

        self.coordinator.run(save, stock)

    def write(self, order: Order) -> None:
        """What a rank's writer does."""
        if order.has("result", self.number):
            report = next(save.report for save in self.saves if save.iteration == order.iteration)
            with contextlib.suppress(ValueError):
                report.with_errors_reported(int)("no number")
        else:
            path = self.job.folder_of(order.iteration) / f"__{self.number}_0.distcp"
            path.write_text(self.job.mark(order))
            if order.has("lose", self.number):
                path.unlink()

    def finalize_calls(self) -> None:
        """`maybe_finalize_async_calls`: ask all ranks, then finalize what all have written."""
        while self.queue:
            request = self.queue[0]
            dead = request.order.has("writer", self.number)
            request.looks -= 1
            found = self.meet("are all writers done", (request.looks >= 0, "its writer was killed" if dead else None))
            if any(problem for _, problem in found):
                raise WriterLostError("; ".join(f"rank {n}: {text}" for n, (_, text) in enumerate(found) if text))
            if any(alive for alive, _ in found):
                return
            self.write(request.order)
            self.queue.popleft()
            for function in request.finalize_fns:
                function()
            self.meet("numbers of calls")

    def index_step(self, order: Order) -> Callable[[], Any]:
        folder = self.job.folder_of(order.iteration)

        def writes(save: Save | None, problems: list[str]) -> None:
            results = self.meet("results", order.has("result", self.number))
            if any(results):
                if self.job.is_old and not self.is_first:
                    return
                # On ranks other than 0 Megatron's says nothing; the writer itself has.
                failures: Any = {results.index(True): (OSError("worker failure"), None)}
                raise CheckpointException("writing", failures if self.is_first else {})
            if self.is_first and order.has("index"):
                problems.append("OSError: no space left")
            elif self.is_first:
                (folder / ".metadata").write_text(self.job.mark(order))
                files = [folder / f"__{rank}_0.distcp" for rank in range(self.job.ranks)]
                problems += [f"{path.name}: it does not exist" for path in files if not path.is_file()]
            if not self.job.is_old:
                self.meet("the index is written")

        def step() -> None:
            self.coordinator.write_index(writes)
            if self.job.is_old and order.asynchronous:
                self.meet("Megatron's barrier")

        return step

    def other_step(self, order: Order) -> Callable[[], Any]:
        def step() -> None:
            if order.asynchronous and order.has("step", self.number):
                raise ValueError("this rank's step")

        return step

    def config_step(self, order: Order) -> Callable[[], Any]:
        def step() -> None:
            if self.is_first:
                if order.asynchronous and order.has("config"):
                    raise OSError("no space left for metadata.json")
                (self.job.folder_of(order.iteration) / "metadata.json").write_text("{}")
            self.meet("Megatron's barrier")

        return step

    def own_step(self, order: Order, tracker: Path) -> Callable[[], Any]:
        def step() -> None:
            if order.asynchronous and order.has("own", self.number):
                raise ValueError("the training script's own")
            if self.is_first:
                tracker.write_text(str(order.iteration))

        return step


class Job:
    """All ranks, over one folder.

    Args:
        run: the folder; checkpoints of an earlier job may lie in it.
        orders: the saves.
        ranks: how many.
        goes_on: whether training goes on when a save fails.
        is_old: Megatron is of 0.12 or before: rank 0 alone raises what a writer has reported, and where the index is
            written in the background, all ranks meet right behind.
    """

    def __init__(
        self, run: Path, orders: Sequence[Order], ranks: int = 3, goes_on: bool = True, is_old: bool = False
    ) -> None:
        self.run, self.orders, self.ranks, self.goes_on, self.is_old = run, orders, ranks, goes_on, is_old
        self.meeting = Meeting(ranks)
        self.members = [Rank(self, number) for number in range(ranks)]
        self.broken: list[str] = []

    def train(self) -> Job:
        """From the first save to the end."""
        threads = [threading.Thread(target=member.train) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.poll()
        return self

    def folder_of(self, iteration: int) -> Path:
        return self.run / f"iter_{iteration:07d}"

    def mark(self, order: Order) -> str:
        """What all files of one save have in common, and no file of another."""
        return f"save {self.orders.index(order)}"

    def is_whole(self, folder: Path) -> bool:
        """It passes for whole, and all that is in it is of one save."""
        files = [folder / ".metadata", *(folder / f"__{rank}_0.distcp" for rank in range(self.ranks))]
        texts = {path.read_text() if path.is_file() else None for path in files}
        return (folder / "metadata.json").is_file() and len(texts) == 1 and None not in texts

    def poll(self) -> None:
        """What a kill at this moment would leave: the tracker names nothing, or what is whole."""
        tracker = self.run / TRACKER
        if tracker.exists() and not self.is_whole(self.folder_of(int(tracker.read_text()))):
            self.broken.append(f"the tracker names {tracker.read_text()}, which is not whole")

    @property
    def folders(self) -> list[Path]:
        return sorted(self.run.glob("iter_*"))

    def states(self, rank: int = 0) -> list[State]:
        return [save.state for save in self.members[rank].saves]
