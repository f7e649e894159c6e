"""Deduplicates reads of several ranks: shared bytes, the rank that reads them, the messages' order.

Every rank computes the same result independently, from the requests of all ranks. Bytes requested by the same ranks
are sent together, in messages that those ranks take turns to read. All messages have one order, by file and byte.
Every rank receives them in this order, so that no cycle of ranks can wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from mcore_ckpt_ext.lazy_torch import numpy
from mcore_ckpt_ext.planning.overlap import Integers

MESSAGE_BYTES = 4 << 20
# Elements of any dtype are aligned in a message, so that they can be viewed in place.
_ALIGNED = 64

Ranks = tuple[int, ...]
Spans: TypeAlias = "Mapping[str, Integers]"
"""By file, `[n, 2]`: the first byte of each span, and one past its last; ascending and disjoint."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes `[start, stop)` of a file, at byte `at` of their message."""

    file: str
    start: int
    stop: int
    at: int


@dataclass(slots=True)
class Message:
    """Bytes that `reader` reads once and sends to the other `ranks`."""

    ranks: Ranks
    reader: int
    stretches: list[Stretch] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Its length, a multiple of the size of every element."""
        last = self.stretches[-1]
        return -(-(last.at + last.stop - last.start) // _ALIGNED) * _ALIGNED

    def route(self, rank: int) -> tuple[int | None, list[int]]:
        """Return the rank that sends the message to this one, and the ranks to send it on to.

        The reader gets None. Receivers forward the message, so even among thousands of ranks each sends it to at most
        a dozen others.
        """
        number = len(self.ranks)
        first = self.ranks.index(self.reader)
        place = (self.ranks.index(rank) - first) % number
        step = 1 << place.bit_length()  # distance from this place to the first place that it sends to
        steps = [step << power for power in range(number.bit_length()) if place + (step << power) < number]
        others = [self.ranks[(first + place + further) % number] for further in steps]
        return (self.ranks[(first + place - (step >> 1)) % number] if place else None), others


def merge_spans(starts: Integers, stops: Integers) -> Integers:
    """Merge overlapping intervals into ascending, disjoint ones, `[n, 2]`.

    Adjacent intervals are not merged.
    """
    order = numpy.argsort(starts, kind="stable")
    starts = starts[order]
    reach = numpy.maximum.accumulate(stops[order])
    heads = numpy.flatnonzero(numpy.concatenate([[True], starts[1:] >= reach[:-1]]))
    return numpy.stack([starts[heads], reach[numpy.concatenate([heads[1:], [len(starts)]]) - 1]], axis=1)


def plan_messages(wants: Sequence[Spans], rank: int) -> list[Message]:
    """Return the messages that a rank sends or receives, in the order common to all ranks.

    Args:
        wants: the requests of every rank; ranks with equal requests may share one object.
        rank: this rank.
    """
    messages: list[Message] = []
    last: dict[Ranks, Message] = {}
    numbers: dict[Ranks, int] = {}
    for file in sorted(wants[rank]):
        for start, stop, ranks in _shared_intervals(file, wants, rank):
            for first in range(start, stop, MESSAGE_BYTES):
                length = min(stop - first, MESSAGE_BYTES)
                message = last.get(ranks)
                if message is None or message.nbytes + length > MESSAGE_BYTES:
                    number = numbers[ranks] = numbers.get(ranks, -1) + 1
                    message = last[ranks] = Message(ranks, ranks[number % len(ranks)])
                    messages.append(message)
                at = message.nbytes if message.stretches else 0
                message.stretches.append(Stretch(file, first, first + length, at))
    return messages


def _shared_intervals(file: str, wants: Sequence[Spans], rank: int) -> Iterator[tuple[int, int, Ranks]]:
    """Yield intervals of a file that this and other ranks request: first byte, end byte, their ranks.

    The end byte is one past the last.
    """
    ranks_by_spans: dict[int, list[int]] = {}
    for number, spans in enumerate(wants):
        if file in spans:
            ranks_by_spans.setdefault(id(spans), []).append(number)
    groups = [(ranks, wants[ranks[0]][file]) for ranks in ranks_by_spans.values()]
    edges = numpy.unique(numpy.concatenate([spans.ravel() for _, spans in groups]))
    # Interval number i is the one between edges i and i + 1.
    ranks_of: list[list[int]] = [[] for _ in edges]
    own_intervals = set(_covered_intervals(edges, wants[rank][file]))
    for ranks, spans_of_ranks in groups:
        for interval in own_intervals.intersection(_covered_intervals(edges, spans_of_ranks)):
            ranks_of[interval] += ranks
    for interval in sorted(own_intervals):
        if len(ranks_of[interval]) > 1:
            yield int(edges[interval]), int(edges[interval + 1]), tuple(sorted(ranks_of[interval]))


def _covered_intervals(edges: Integers, spans: Integers) -> Iterator[int]:
    """Yield the numbers of the intervals between adjacent edges that a span covers."""
    first = numpy.searchsorted(edges, spans[:, 0])
    last = numpy.searchsorted(edges, spans[:, 1])
    return chain.from_iterable(map(range, first.tolist(), last.tolist()))
