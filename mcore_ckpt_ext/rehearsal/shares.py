"""Plans the reads of every rank's optimizer, and verifies the masters that it would read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce

from mcore_ckpt_ext.communicator import Communicator, run_on_all
from mcore_ckpt_ext.errors import ContentError
from mcore_ckpt_ext.layout.local_model import ModelRank
from mcore_ckpt_ext.megatron.live.master_check import prove
from mcore_ckpt_ext.megatron.live.planning import plan_rank
from mcore_ckpt_ext.megatron.live.resume import Resume
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM
from mcore_ckpt_ext.optimizers.groups import Group
from mcore_ckpt_ext.optimizers.model_space_formats import is_layer_wise
from mcore_ckpt_ext.planning.plan import TargetSlice, plans_of
from mcore_ckpt_ext.rehearsal.agreement import RefusedError, run_by_rank
from mcore_ckpt_ext.rehearsal.data_parallel import DataParallelRanks
from mcore_ckpt_ext.rehearsal.ranks import Held, SimulatedJob, SimulatedShard
from mcore_ckpt_ext.transfer import read_wanted

_SAMPLE = 1024
_BLOCK = 1 << 24


@dataclass
class Figures:
    """The running counts of a rehearsal; see `Rehearsal`."""

    parts: int = 0
    elements: int = 0
    weights: int = 0
    bytes_read: int = 0
    optimizer_bytes_read: int = 0
    proven: int = 0
    names: set[str] = field(default_factory=set)

    def together(self, other: Figures) -> Figures:
        """Return the sum of the counts of two processes."""
        numbers = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)[:-1]}
        return Figures(**numbers, names=self.names | other.names)


# A pipeline stage, and the number of a part on its ranks, or of a weight that they load.
_Place = tuple[int, int]


class Shares:
    """The shards of all ranks of a simulated job."""

    def __init__(
        self,
        job: SimulatedJob,
        resume: Resume,
        groups: Sequence[Sequence[Group]],
        ranks: DataParallelRanks,
        team: Communicator,
    ) -> None:
        """`team`: the processes that share the parts; each gets the same result."""
        self._job = job
        self._resume = resume
        self._groups = groups
        self._ranks = ranks
        self._checkpoint = resume.checkpoint
        self._team = team
        self._figures = Figures()

    @property
    def figures(self) -> Figures:
        """The counts of all processes together."""
        return reduce(Figures.together, self._team.gather(self._figures))

    def plan(self, phase: str) -> None:
        """Plan the reads of all shards; a part that several ranks have is planned once.

        Data-parallel ranks have disjoint pieces that together form a part, so a plan for the part covers all of them.

        Raises:
            RefusedError: some rank would refuse.
        """
        wrong: list[_Place] = []

        def work() -> None:
            for pipeline, held in self._stages():
                for copies, numbers in self._ranks_by_copies(held):
                    local = self._own(numbers)
                    alike = [held[number] for number in local]
                    try:
                        read = self._plan([part.shard for part in alike]) * copies if alike else 0
                        self._figures.bytes_read += read
                        self._figures.optimizer_bytes_read += read
                    except ContentError:
                        refused = [number for number in local if self._is_refused(held[number])] or local
                        wrong.extend((pipeline, number) for number in refused)
                    self._count(alike, copies)

        run_on_all(self._team, work)
        self._refuse_any(phase, wrong, self._plan)

    def find_weights(self) -> None:
        """Plan the reads of all weights that some rank loads.

        Raises:
            RefusedError: a weight is missing; Megatron's own message differs.
        """
        missing: list[_Place] = []

        def work() -> None:
            for pipeline in range(self._job.layout.pipeline):
                weights = self._job.weights(pipeline)
                for number in self._own(range(len(weights))):
                    target, ranks = weights[number]
                    try:
                        read = sum(plan.bytes_read for plan in plans_of(target, self._checkpoint))
                    except ContentError:
                        missing.append((pipeline, number))
                        return
                    self._figures.weights += target.slice.numel
                    self._figures.bytes_read += read * ranks

        run_on_all(self._team, work)
        places = sorted(set().union(*self._team.gather(missing)))
        if places:
            pipeline, number = places[0]
            try:
                plans_of(self._job.weights(pipeline)[number][0], self._checkpoint)
            except ContentError as error:
                raise RefusedError(error, is_verbatim=False) from error

    def prove(self, phase: str, *, full: bool) -> None:
        """Compare masters with their weights: all of them, or the first ones of every part.

        Raises:
            RefusedError: some rank would refuse.
        """
        wrong: list[_Place] = []

        def work() -> None:
            for pipeline, held in self._stages():
                for number in self._own(range(len(held))):
                    shard = held[number].shard
                    if self._checkpoint.optimizer.masters_are_derived(shard.name):
                        continue
                    try:
                        for piece in _pieces(shard, full=full):
                            self._prove([piece])
                            self._figures.proven += piece.slice.numel
                    except ContentError:
                        wrong.append((pipeline, number))

        run_on_all(self._team, work)
        self._refuse_any(phase, wrong, self._prove)

    def _stages(self) -> Iterator[tuple[int, list[Held]]]:
        for pipeline in range(self._job.layout.pipeline):
            yield pipeline, self._job.parts_of_stage(pipeline)

    def _own(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return this process's part of some work."""
        return numbers[self._team.rank :: self._team.size]

    def _ranks_by_copies(self, held: Sequence[Held]) -> Iterator[tuple[int, list[int]]]:
        """Yield (reads, parts): how often the job reads each part; ranks that share state read it once.

        Each of `--num-distributed-optimizer-instances` has a whole optimizer.
        """
        state = self._checkpoint.optimizer.state()
        by_reads = dict[int, list[int]]()
        arguments = self._job.arguments
        is_shared = is_layer_wise(arguments)  # whole parameters, but each on one of the ranks
        instances = arguments.num_distributed_optimizer_instances or 1
        for number, part in enumerate(held):
            is_shared_out = is_shared or state.is_distributed(part.shard.name)
            ranks = instances if is_shared_out else self._job.copies(part.places[0])
            by_reads.setdefault(len(part.places) * ranks, []).append(number)
        yield from by_reads.items()

    def _plan(self, shards: Sequence[SimulatedShard]) -> int:
        """Plan shards, and return the number of bytes to read."""
        plan = plan_rank(self._resume, shards, self._groups)
        return sum(read_plan.bytes_read for read_plan in plan.reading.plans)

    def _is_refused(self, part: Held) -> bool:
        try:
            self._plan([part.shard])
        except ContentError:
            return True
        return False

    def _count(self, held: Sequence[Held], copies: int) -> None:
        figures = self._figures
        figures.names |= {part.shard.name for part in held}
        figures.parts += sum(len(part.places) for part in held)
        figures.elements += sum(part.shard.slice.numel * (1 + len(part.shard.kinds)) for part in held) * copies

    def _prove(self, shards: Sequence[SimulatedShard]) -> None:
        for shard in shards:
            tensors = {name: replace(tensor, dtype="float32") for name, tensor in shard.live.tensors.items()}
            target = TargetSlice(FP32_PARAM, shard.slice, tensors, shard.live.may_pad)
            prove(shard, read_wanted(self._checkpoint, self._checkpoint.files.transfer, target), self._checkpoint)

    def _refuse_any(
        self, phase: str, wrong: Sequence[_Place], work: Callable[[Sequence[SimulatedShard]], object]
    ) -> None:
        """Refuse if a process found an error for a part, with the message of the ranks that have elements.

        Raises:
            RefusedError: there is such a part.
        """
        places = sorted(set().union(*self._team.gather(list(wrong))))
        if not places:
            return
        faulty = [self._job.parts_of_stage(pipeline)[number] for pipeline, number in places]
        by_place: dict[ModelRank, list[SimulatedShard]] = {}
        for part in faulty:
            for place in part.places:
                by_place.setdefault(place, []).append(part.shard)

        def work_of_rank(rank: int) -> None:
            if shards := self._ranks.shards(rank, by_place):
                work(shards)

        run_by_rank(phase, self._job.layout.world, work_of_rank, is_verbatim=self._ranks.are_known)
        # No rank's own elements reproduce the error, but those of the whole part do.
        try:
            work([part.shard for part in faulty])
        except ContentError as problem:
            raise RefusedError(problem, is_verbatim=False) from problem


def _pieces(shard: SimulatedShard, *, full: bool) -> Iterator[SimulatedShard]:
    """Yield the pieces of a part to compare: all of it, block by block, or its first elements."""
    start = shard.slice.start
    stop = shard.slice.stop
    if full:
        for begin in range(start, stop, _BLOCK):
            yield shard.part(begin, min(begin + _BLOCK, stop))
        return
    yield shard.part(start, min(start + _SAMPLE, stop))
