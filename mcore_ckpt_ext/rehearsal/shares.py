"""Plans what every rank reads for its optimizer, and proves the masters that it would read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from mcore_ckpt_ext.errors import CheckpointError
from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.layout.local_model import ModelRank
from mcore_ckpt_ext.megatron.live.master_check import prove
from mcore_ckpt_ext.megatron.live.planning import plan_rank
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM
from mcore_ckpt_ext.optimizers.groups import Group
from mcore_ckpt_ext.planning.plan import WantedSlice, plans_of
from mcore_ckpt_ext.rehearsal.agreement import RefusedError, by_rank
from mcore_ckpt_ext.rehearsal.data_parallel import DataParallelRanks
from mcore_ckpt_ext.rehearsal.ranks import Held, SimulatedJob, SimulatedShard
from mcore_ckpt_ext.transfer import read_wanted

PLANNING, PROVING = "planning the resume", "proving the masters against the weights"
_SAMPLE = 1024
_BLOCK = 1 << 24


@dataclass
class Figures:
    """What a rehearsal has counted so far; see `Rehearsal`."""

    parts: int = 0
    elements: int = 0
    weights: int = 0
    bytes_read: int = 0
    proven: int = 0
    names: set[str] = field(default_factory=set)


class Shares:
    """The shards of all ranks of a simulated job."""

    def __init__(
        self,
        job: SimulatedJob,
        checkpoint: CheckpointView,
        groups: Sequence[Sequence[Group]],
        ranks: DataParallelRanks,
        *,
        own_bounds: bool,
    ) -> None:
        self._job, self._checkpoint, self._groups, self._ranks = job, checkpoint, groups, ranks
        self._own_bounds = own_bounds
        self.figures = Figures()

    def plan(self) -> None:
        """Find every element of every shard; parts that several ranks hold are planned once.

        Data-parallel ranks hold disjoint pieces of a part, which together are all of it: what is found for the part is
        found for each of them.

        Raises:
            RefusedError: some rank would refuse.
        """
        wrong: list[Held] = []
        problem: CheckpointError | None = None
        for held in self._stages():
            for copies, alike in self._by_copies(held):
                try:
                    self.figures.bytes_read += self._plan([one.shard for one in alike]) * copies
                except CheckpointError as error:
                    problem = problem or error
                    wrong += [one for one in alike if self._is_refused(one)] or alike
                self._count(alike, copies)
        if problem is not None:
            self._refuse(PLANNING, wrong, self._plan, problem)

    def find_weights(self) -> None:
        """Find every element of every weight that some rank loads.

        Raises:
            RefusedError: one is not there; Megatron says so in words of its own.
        """
        for pipeline in range(self._job.layout.pipeline):
            for wanted, ranks in self._job.weights(pipeline):
                try:
                    read = sum(plan.bytes_read for plan in plans_of(wanted, self._checkpoint))
                except CheckpointError as error:
                    raise RefusedError(error, is_verbatim=False) from error
                self.figures.weights += wanted.slice.numel
                self.figures.bytes_read += read * ranks

    def prove(self, *, full: bool) -> None:
        """Compare masters with their weights: all of them, or the first ones of every part.

        Raises:
            RefusedError: some rank would refuse.
        """
        wrong: list[Held] = []
        problem: CheckpointError | None = None
        for held in self._stages():
            for one in held:
                if self._checkpoint.masters_are_derived(one.shard.name):
                    continue
                try:
                    for piece in _pieces(one.shard, full=full):
                        self._prove([piece])
                        self.figures.proven += piece.slice.numel
                except CheckpointError as error:
                    problem = problem or error
                    wrong.append(one)
        if problem is not None:
            self._refuse(PROVING, wrong, self._prove, problem)

    def _stages(self) -> Iterator[list[Held]]:
        for pipeline in range(self._job.layout.pipeline):
            yield self._job.held(pipeline)

    def _by_copies(self, held: Sequence[Held]) -> Iterator[tuple[int, list[Held]]]:
        """Parts with the number of times that the job's ranks read them: once for each group that shares them out."""
        state, found = self._checkpoint.optimizer, dict[int, list[Held]]()
        for one in held:
            ranks = 1 if state.is_distributed(one.shard.name) else self._job.copies(one.places[0])
            found.setdefault(len(one.places) * ranks, []).append(one)
        yield from found.items()

    def _plan(self, shards: Sequence[SimulatedShard]) -> int:
        """Plan shards; returns the bytes that are read for them."""
        plan = plan_rank(self._checkpoint, shards, self._groups, own_bounds=self._own_bounds)
        return sum(one.bytes_read for one in plan.reading.plans)

    def _is_refused(self, one: Held) -> bool:
        try:
            self._plan([one.shard])
        except CheckpointError:
            return True
        return False

    def _count(self, held: Sequence[Held], copies: int) -> None:
        figures = self.figures
        figures.names |= {one.shard.name for one in held}
        figures.parts += sum(len(one.places) for one in held)
        figures.elements += sum(one.shard.slice.numel * (1 + len(one.shard.kinds)) for one in held) * copies

    def _prove(self, shards: Sequence[SimulatedShard]) -> None:
        for shard in shards:
            own = {name: replace(tensor, dtype="float32") for name, tensor in shard.live.tensors.items()}
            wanted = WantedSlice(FP32_PARAM, shard.slice, own, shard.live.may_pad)
            prove(shard, read_wanted(self._checkpoint, self._checkpoint.transfer, wanted), self._checkpoint)

    def _refuse(
        self,
        phase: str,
        wrong: Sequence[Held],
        work: Callable[[Sequence[SimulatedShard]], object],
        problem: CheckpointError,
    ) -> NoReturn:
        """Refuse in the words of the ranks that hold an element of a part with which something is wrong."""
        by_place: dict[ModelRank, list[SimulatedShard]] = {}
        for one in wrong:
            for place in one.places:
                by_place.setdefault(place, []).append(one.shard)

        def of_rank(rank: int) -> None:
            if shards := self._ranks.shards(rank, by_place):
                work(shards)

        by_rank(phase, self._job.layout.world, of_rank, is_verbatim=self._ranks.are_known)
        raise RefusedError(problem, is_verbatim=False) from problem


def _pieces(shard: SimulatedShard, *, full: bool) -> Iterator[SimulatedShard]:
    """What is compared of a part: all of it, block by block, or its first elements."""
    start, stop = shard.slice.start, shard.slice.stop
    if full:
        for begin in range(start, stop, _BLOCK):
            yield shard.part(begin, min(begin + _BLOCK, stop))
        return
    yield shard.part(start, min(start + _SAMPLE, stop))
