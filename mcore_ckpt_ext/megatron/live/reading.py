"""Plans and reads the optimizer state of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar

import torch

from mcore_ckpt_ext.formats.view import CheckpointView
from mcore_ckpt_ext.megatron.live.broadcast_read import ReadOnce, wanted_bytes
from mcore_ckpt_ext.megatron.live.optimizer_adapters.adapter import Shard
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM
from mcore_ckpt_ext.planning.plan import Plan, TargetSlice, make_plan, plans_of
from mcore_ckpt_ext.planning.read_dedup import Spans
from mcore_ckpt_ext.transfer import read_wanted

OwnShard = TypeVar("OwnShard", bound=Shard)


class Reading(Generic[OwnShard]):
    """The read plan of one rank, and the shard for each part of it."""

    def __init__(self, checkpoint: CheckpointView, shards: Sequence[OwnShard], accept_lost: bool) -> None:
        self._checkpoint = checkpoint
        self._accept_lost = accept_lost
        requests = [(kind, shard) for shard in shards for kind in (FP32_PARAM, *shard.kinds)]
        derived = [request for request in requests if checkpoint.derivation(request[0], request[1].name) is not None]
        self._derived = {request: plans_of(_slice(*request), checkpoint, accept_lost) for request in derived}
        self._stored = [request for request in requests if request not in self._derived]
        self._plan = make_plan([_slice(*request) for request in self._stored], checkpoint, accept_lost)
        for plan in self.plans:
            for read in plan.reads:
                checkpoint.files.transfer.locate(read.extent)

        self._once: dict[str, ReadOnce] = {}

    def wanted_bytes(self) -> dict[str, Spans]:
        """Return the byte ranges of each kind that this rank needs, except inputs of derived values."""
        transfer = self._checkpoint.files.transfer
        return {kind: wanted_bytes(self._plan.part_of_kind(kind), transfer) for kind in (FP32_PARAM, *self.kinds)}

    def share(self, wants: Sequence[Mapping[str, Spans]]) -> None:
        """Make `read` collective: one rank reads data of a kind that several ranks need.

        Args:
            wants: `wanted_bytes` of every rank.
        """
        reader = self._checkpoint.files.reader
        transfer = self._checkpoint.files.transfer
        for kind in (FP32_PARAM, *self.kinds):
            of_ranks = [spans.get(kind, {}) for spans in wants]
            self._once[kind] = ReadOnce(self._plan.part_of_kind(kind), reader, transfer, of_ranks)

    @contextmanager
    def taking_part(self, kinds: Iterable[str]) -> Iterator[None]:
        """Within this scope, a rank that fails still sends its messages of these kinds."""
        with ExitStack() as stack:
            for kind in reversed(list(kinds)):
                if kind in self._once:
                    stack.enter_context(self._once[kind].taking_part())
            yield

    @property
    def plans(self) -> list[Plan]:
        """All plans: for stored values, and for the inputs of derived values."""
        return [self._plan, *(plan for plans in self._derived.values() for plan in plans)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all shards' moments, in the order in which all ranks read them."""
        return tuple(sorted({kind for kind, _ in (*self._stored, *self._derived)} - {FP32_PARAM}))

    def shards(self, kind: str) -> list[OwnShard]:
        """Return the shards that keep a kind."""
        return [shard for shard_kind, shard in (*self._stored, *self._derived) if shard_kind == kind]

    def read(
        self,
        kind: str,
        rooms: Mapping[OwnShard, torch.Tensor],
        on_read: Callable[[OwnShard, int, int], None] | None = None,
    ) -> dict[OwnShard, list[slice]]:
        """Read all state of one kind.

        Args:
            kind: the kind.
            rooms: the memory, 1-D, for each shard that keeps it.
            on_read: called with a shard and the range of elements just read, see `Transfer.execute`.

        Returns:
            The elements that the checkpoint does not have, by shard.
        """
        targets = {target: shard for target, (shard_kind, shard) in enumerate(self._stored) if shard_kind == kind}
        part = self._plan.part_of_kind(kind)
        transfer = self._checkpoint.files.transfer
        memory = {target: rooms[shard] for target, shard in targets.items()}
        if kind in self._once:
            self._once[kind].execute(memory)
        else:
            seen = None if on_read is None else lambda target, start, stop: on_read(targets[target], start, stop)
            transfer.execute(part, memory, seen)
        missing: dict[OwnShard, list[slice]] = {}
        for fill in part.fills:
            missing.setdefault(targets[fill.target], []).append(slice(fill.start, fill.stop))
        for (shard_kind, shard), plans in self._derived.items():
            if shard_kind == kind:
                values = read_wanted(self._checkpoint, transfer, _slice(kind, shard), self._accept_lost)
                rooms[shard].copy_(values)
                missing[shard] = [slice(fill.start, fill.stop) for plan in plans for fill in plan.fills]
        return missing


def _slice(kind: str, shard: Shard) -> TargetSlice:
    return TargetSlice(kind, shard.slice, shard.live.tensors, shard.live.may_pad)
