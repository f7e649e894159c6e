from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.peers.results import FAILED, PASSED, SKIPPED, UNFINISHED, Comparison, Outcome, merged, sampled

GOOD, BAD = Outcome(PASSED), Outcome(FAILED, "ValueError: no\nmore")


def ranks(folder: Path, *lines: list[dict[str, str]]) -> list[Path]:
    files = [folder / f"rank{rank}.jsonl" for rank in range(len(lines))]
    for file, written in zip(files, lines, strict=True):
        file.write_text("".join(json.dumps(line) + "\n" for line in written))
    return files


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        ([PASSED, PASSED], PASSED),
        ([PASSED, SKIPPED], PASSED),
        ([SKIPPED, SKIPPED], SKIPPED),
        ([PASSED, FAILED], FAILED),
        ([PASSED, None], UNFINISHED),
        ([FAILED, None], FAILED),
    ],
)
def test_a_test_is_as_good_as_its_worst_rank(tmp_path: Path, outcomes: list[str | None], state: str) -> None:
    lines = [[{"test": "a"}, *([{"test": "a", "outcome": one}] if one else [])] for one in outcomes]
    assert merged(ranks(tmp_path, *lines))["a"].state == state


def test_a_test_that_a_rank_never_started_is_not_finished(tmp_path: Path) -> None:
    assert merged(ranks(tmp_path, [{"test": "a"}, {"test": "a", "outcome": PASSED}], []))["a"].state == UNFINISHED


def test_a_comparison_names_what_breaks_and_what_is_mended() -> None:
    without = {"same": GOOD, "broken": GOOD, "gone": GOOD, "mended": BAD, "both": BAD, "refusal": GOOD}
    with_package = {"same": GOOD, "broken": BAD, "mended": GOOD, "both": BAD, "refusal": Outcome(UNFINISHED)}
    found = Comparison(without, with_package, {"refusal": "asserts what the package removes"})
    assert found.broken == ["broken", "gone", "refusal"]
    assert found.unexpected == ["broken", "gone"]
    assert found.mended == ["mended"]
    table = found.table()
    assert "failed in both: 1" in table
    assert "expected: asserts what the package removes" in table
    assert "failed: ValueError: no\n" in table


def test_tests_that_passed_and_only_ran_with_the_package_are_no_difference() -> None:
    found = Comparison({}, {"a": GOOD, "b": GOOD}, {})
    assert (found.broken, found.mended, found.unexpected) == ([], [], [])


def test_a_case_that_fails_and_only_ran_with_the_package_is_one() -> None:
    """A launch without it may have ended before the case."""
    assert Comparison({"a": GOOD}, {"a": GOOD, "b": BAD}, {}).unexpected == ["b"]


def test_a_sample_spans_the_parameter_sets_of_each_function() -> None:
    tests = ["a::b", *(f"a::c[{place}]" for place in range(10)), "a::d[0]", "a::d[1]"]
    assert sampled(tests, 3) == {"a::b", "a::c[0]", "a::c[4]", "a::c[9]", "a::d[0]", "a::d[1]"}
    assert sampled(tests, 1) == {"a::b", "a::c[0]", "a::d[0]"}
    assert sampled(tests, 10) == set(tests)
