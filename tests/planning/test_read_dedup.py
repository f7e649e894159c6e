"""Test data that several ranks need: every byte is in one message, in one order for all ranks."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt_ext.planning import read_dedup
from mcore_ckpt_ext.planning.overlap import fold
from mcore_ckpt_ext.planning.read_dedup import Message, Spans, merge_spans, plan_messages

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=6)
wishes = st.lists(st.dictionaries(st.sampled_from("ab"), intervals, max_size=2), min_size=1, max_size=5)


def spans(wish: dict[str, list[tuple[int, int]]]) -> Spans:
    return {
        file: merge_spans(numpy.array([a for a, _ in some]), numpy.array([a + n for a, n in some]))
        for file, some in wish.items()
    }


def places(wanted: Spans) -> set[tuple[str, int]]:
    return {(file, place) for file, some in wanted.items() for a, b in some.tolist() for place in range(a, b)}


@given(wishes)
def test_every_byte_that_several_want_is_in_one_message_of_all_of_them(
    wish: list[dict[str, list[tuple[int, int]]]],
) -> None:
    wants = [spans(one) for one in wish]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_dedup, "MESSAGE_BYTES", 64)
        patch.setattr(read_dedup, "_ALIGNED", 8)
        of_ranks = [plan_messages(wants, rank) for rank in range(len(wants))]
    readers: dict[tuple[str, int], int] = {}
    for rank, messages in enumerate(of_ranks):
        seen = set()
        for message in messages:
            assert rank in message.ranks
            assert message.reader in message.ranks
            # Every other rank has the same message, and none that comes between is in another order there.
            assert all(message in of_ranks[other] for other in message.ranks)
            assert message.nbytes <= 64
            end = 0
            for stretch in message.stretches:
                assert stretch.at >= end
                assert stretch.at % 8 == 0
                end = stretch.at + stretch.stop - stretch.start
                for place in ((stretch.file, byte) for byte in range(stretch.start, stretch.stop)):
                    assert readers.setdefault(place, message.reader) == message.reader
                    assert place not in seen
                    seen.add(place)
        others = [places(other) for number, other in enumerate(wants) if number != rank]
        assert seen == places(wants[rank]) & set().union(*others)
        firsts = [(message.stretches[0].file, message.stretches[0].start) for message in messages]
        assert firsts == sorted(firsts)


def test_ranks_that_want_the_same_read_in_turn() -> None:
    same = spans({"a": [(0, 10 * read_dedup.MESSAGE_BYTES)]})
    messages = plan_messages([same, same, same, {}], 1)
    assert [message.reader for message in messages] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


@given(st.sets(st.integers(0, 5000), min_size=2, max_size=200), st.integers(0, 1000))
def test_a_message_comes_to_every_rank_once(some: set[int], reader: int) -> None:
    ranks = tuple(sorted(some))
    message = Message(ranks, ranks[reader % len(ranks)])
    routes = {rank: message.route(rank) for rank in ranks}
    waiting, reached = [message.reader], {message.reader}
    while waiting:
        rank = waiting.pop()
        for other in routes[rank][1]:
            assert routes[other][0] == rank
            assert other not in reached
            reached.add(other)
            waiting.append(other)
    assert reached == some
    assert routes[message.reader][0] is None
    assert max(len(others) for _, others in routes.values()) <= len(ranks).bit_length()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=12),
    st.integers(0, 40), st.integers(0, 40),
)  # fmt: skip
def test_a_part_of_runs_is_those_elements_and_no_others(rows: list[tuple[int, int]], low: int, high: int) -> None:
    gaps, lengths = numpy.array([gap for gap, _ in rows]), numpy.array([length for _, length in rows])
    source = numpy.cumsum(gaps + lengths) - lengths
    target = numpy.cumsum(lengths) - lengths
    runs = fold(source, target, lengths)

    def pairs(some: list[tuple[int, int, int, int, int, int]]) -> set[tuple[int, int]]:
        return {
            (s + row * ss + at, t + row * ts + at) for s, t, n, count, ss, ts in some for row in range(count)
            for at in range(n)
        }  # fmt: skip

    assert pairs(runs.within(low, high).rows()) == {(s, t) for s, t in pairs(runs.rows()) if low <= s < high}
