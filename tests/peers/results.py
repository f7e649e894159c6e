"""Outcomes of tests, merged over ranks and compared between two runs, as data."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
UNFINISHED = "not finished"
"""The launch ended within the test: its time limit, or a rank that died."""
BAD = (FAILED, UNFINISHED)
CASE = " > "
"""Stands between a test and a case that it goes through."""


@dataclass(frozen=True)
class Outcome:
    """How a test ended, and the message of the first rank that failed."""

    state: str
    message: str = ""

    @property
    def is_bad(self) -> bool:
        """True unless the test passed or was skipped."""
        return self.state in BAD


def merged(files: Iterable[Path]) -> dict[str, Outcome]:
    """Returns the outcome of each test that any rank has started: the worst of all ranks."""
    ranks = [_of_rank(file) for file in files]
    absent = Outcome(UNFINISHED, "not started on a rank")
    return {test: _worst([rank.get(test, absent) for rank in ranks]) for test in dict.fromkeys(chain(*ranks))}


def _of_rank(file: Path) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        found[line["test"]] = Outcome(line.get("outcome", UNFINISHED), line.get("message", ""))
    return found


def _worst(outcomes: list[Outcome]) -> Outcome:
    for state in (FAILED, UNFINISHED, PASSED, SKIPPED):
        for outcome in outcomes:
            if outcome.state == state:
                return outcome
    raise ValueError("no rank")


def sampled(tests: Iterable[str], most: int) -> Collection[str]:
    """Returns at most so many tests of each function, evenly spaced over its parameter sets, from first to last."""
    functions: defaultdict[str, list[str]] = defaultdict(list)
    for test in tests:
        functions[test.partition("[")[0]].append(test)
    chosen: set[str] = set()
    for found in functions.values():
        gaps = max(1, most - 1)
        places = range(len(found)) if len(found) <= most else [(len(found) - 1) * at // gaps for at in range(most)]
        chosen.update(found[place] for place in places)
    return chosen


@dataclass(frozen=True)
class Comparison:
    """The tests of a suite without the package and with it.

    Args:
        without, with_package: the outcome of each test.
        expected: tests that may fail with the package, each with its reason.
    """

    without: Mapping[str, Outcome]
    with_package: Mapping[str, Outcome]
    expected: Mapping[str, str]

    @property
    def broken(self) -> list[str]:
        """Tests that fail with the package, or are not there with it, and do not fail without it."""
        tests = dict.fromkeys([*self.without, *self.with_package])
        return [test for test in tests if self._bad_with(test) and not self._bad_without(test)]

    @property
    def mended(self) -> list[str]:
        """Tests that fail without the package and pass with it."""
        return [
            test
            for test, outcome in self.without.items()
            if outcome.is_bad and self.with_package.get(test, outcome).state == PASSED
        ]

    @property
    def unexpected(self) -> list[str]:
        """Those of `broken` that have no reason."""
        return [test for test in self.broken if test not in self.expected]

    def _bad_without(self, test: str) -> bool:
        return test in self.without and self.without[test].is_bad

    def _bad_with(self, test: str) -> bool:
        return test not in self.with_package or self.with_package[test].is_bad

    def table(self) -> str:
        """Returns both counts and all differences, as text."""
        states = (PASSED, FAILED, UNFINISHED, SKIPPED)
        lines = [f"{'':24}" + "".join(f"{state:>14}" for state in states)]
        for title, outcomes in (("without the package", self.without), ("with the package", self.with_package)):
            counts = Counter(outcome.state for outcome in outcomes.values())
            lines.append(f"{title:24}" + "".join(f"{counts[state]:>14}" for state in states))
        both = sum(outcome.is_bad and self._bad_with(test) for test, outcome in self.without.items())
        lines += ["", f"failed in both: {both}"]
        lines += ["", f"passes without the package, fails with it: {len(self.broken)}"]
        for test in self.broken:
            found = self.with_package.get(test, Outcome("missing"))
            reason = self.expected.get(test)
            first = next(iter(found.message.splitlines()), "")
            lines.append(f"  {test}\n      {f'expected: {reason}' if reason else f'{found.state}: {first}'}")
        lines += ["", f"fails without the package, passes with it: {len(self.mended)}"]
        lines += [f"  {test}" for test in self.mended]
        return "\n".join(lines)
