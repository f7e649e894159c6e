"""Test that habits that make code slow to read do not become more frequent, and that they are counted."""

from __future__ import annotations

from pathlib import Path

import code_habits

EXAMPLE = """
def of_a_file(a, b, c, d, e, f, g, h):
    found = [a]
    x, y = a, b
    x, y = y, x
    size, rank = size_and_rank()
    return f"{size} files, {rank} of {LIMIT} steps, {counted(size, 'large file')}"


def from_text(cls, a, b, c, d, e, f, g):
    return a


def merged(a, b):
    return a


@keeps_signature
def state_dict(a, b, c, d, e, f, g, h):
    return a
"""


def test_no_habit_is_more_frequent_than_before() -> None:
    """Limits are lowered when some are mended, and never raised: `scripts/code_habits.py --places` lists them."""
    counted = code_habits.counts()
    assert sum(counted.values()) > 0
    assert {habit: counted[habit] for habit in code_habits.too_frequent(counted)} == {}


def test_each_habit_is_counted(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLE)
    (tmp_path / "long.py").write_text("def long():\n" + "    x = 1\n" * 360)
    assert code_habits.counts(tmp_path) == dict.fromkeys(code_habits.LIMITS, 1) | {"lines exempt from the formatter": 0}
    (tmp_path / "exempt.py").write_text("x = 1  # fmt: skip\n")
    assert code_habits.counts(tmp_path)["lines exempt from the formatter"] == 1
