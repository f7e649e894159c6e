"""Bytes that several ranks want: which they are, who of them reads them, and in which order they are sent.

Every rank works this out by itself, from what all of them want, and comes to the same: bytes wanted by the same ranks
travel together, in messages that those ranks read in turn; all messages are in one order, by file and byte, and whoever
takes them in that order waits for nobody who waits for him.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy

from mcore_ckpt_ext.planning.overlap import Integers

MESSAGE_BYTES = 4 << 20
# Elements of any dtype can be looked at where they lie in a message.
_ALIGNED = 64

Ranks = tuple[int, ...]
Spans = Mapping[str, Integers]
"""By file, `[n, 2]`: the bytes from the first, below the second; ascending, none overlapping."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes `[start, stop)` of a file, which lie at byte `at` of their message."""

    file: str
    start: int
    stop: int
    at: int


@dataclass(slots=True)
class Message:
    """Bytes that are read once: by `reader`, which sends them to the other `ranks`."""

    ranks: Ranks
    reader: int
    stretches: list[Stretch] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Its length, a multiple of the size of every element."""
        last = self.stretches[-1]
        return _aligned(last.at + last.stop - last.start)

    def route(self, rank: int) -> tuple[int | None, list[int]]:
        """From whom a rank gets it, None for the reader, and to whom it then sends it.

        Who has it hands it on, so that of thousands of ranks none sends to more than a dozen, always the same ones.
        """
        number, first = len(self.ranks), self.ranks.index(self.reader)
        place = (self.ranks.index(rank) - first) % number
        step = 1 << place.bit_length()  # the first that this place hands on to is so much further
        steps = [step << power for power in range(number.bit_length()) if place + (step << power) < number]
        others = [self.ranks[(first + place + further) % number] for further in steps]
        return (self.ranks[(first + place - (step >> 1)) % number] if place else None), others


def united(starts: Integers, stops: Integers) -> Integers:
    """Intervals, `[n, 2]`, ascending, none overlapping, that cover what some intervals cover; neighbours stay apart."""
    order = numpy.argsort(starts, kind="stable")
    starts, reach = starts[order], numpy.maximum.accumulate(stops[order])
    heads = numpy.flatnonzero(numpy.concatenate([[True], starts[1:] >= reach[:-1]]))
    return numpy.stack([starts[heads], reach[numpy.concatenate([heads[1:], [len(starts)]]) - 1]], axis=1)


def messages_of(wants: Sequence[Spans], rank: int) -> list[Message]:
    """The messages that a rank has a part in, in the order in which all ranks take them.

    Args:
        wants: what every rank wants; ranks that want the same may share one object.
        rank: this one.
    """
    messages: list[Message] = []
    last: dict[Ranks, Message] = {}
    numbers: dict[Ranks, int] = {}
    for file in sorted(wants[rank]):
        for start, stop, ranks in _shared(file, wants, rank):
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


def _shared(file: str, wants: Sequence[Spans], rank: int) -> Iterator[tuple[int, int, Ranks]]:
    """Intervals of a file that this rank wants and another one, too: first byte, one past the last, who wants them."""
    alike: dict[int, list[int]] = {}
    for number, spans in enumerate(wants):
        if file in spans:
            alike.setdefault(id(spans), []).append(number)
    groups = [(ranks, wants[ranks[0]][file]) for ranks in alike.values()]
    edges = numpy.unique(numpy.concatenate([spans.ravel() for _, spans in groups]))
    who: list[list[int]] = [[] for _ in edges]
    own = set(_covered(edges, wants[rank][file]))
    for ranks, of_them in groups:
        for place in own.intersection(_covered(edges, of_them)):
            who[place] += ranks
    for place in sorted(own):
        if len(who[place]) > 1:
            yield int(edges[place]), int(edges[place + 1]), tuple(sorted(who[place]))


def _covered(edges: Integers, spans: Integers) -> Iterator[int]:
    """The numbers of the intervals between neighbouring edges that lie in a span."""
    first, last = numpy.searchsorted(edges, spans[:, 0]), numpy.searchsorted(edges, spans[:, 1])
    return chain.from_iterable(map(range, first.tolist(), last.tolist()))


def _aligned(position: int) -> int:
    return -(-position // _ALIGNED) * _ALIGNED
