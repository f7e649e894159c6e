"""Counts habits that make code slow to read, and ends with 1 if one has become more frequent.

    python3 scripts/code_habits.py            a row for each habit: count, limit
    python3 scripts/code_habits.py --places   and where it is found

Limits are today's counts: lower one when you have mended some, and never raise one.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mcore_ckpt_ext"
# Local names that say nothing of what they hold.
EMPTY_NAMES = {"found", "one", "own", "known", "wanted", "what"}
PREPOSITIONS = ("in", "of", "from", "to", "with", "without", "by", "at", "on", "for", "after", "before", "as")
# Methods that the field names so: alternative constructors, conversions, changed copies.
ACCEPTED = ("from_", "to_", "with_", "as_")
# `merged`, which a list of imports does not explain; with its noun (`merged_view`) it is one.
IRREGULAR = (
    "begun", "broken", "built", "chosen", "drawn", "found", "given", "held", "kept", "known", "left", "lost", "made",
    "written", "differing", "fitting", "holding", "lacking", "matching", "missing", "reading",
)  # fmt: skip
PARTICIPLE = re.compile("|".join(("[a-z]+ed", *IRREGULAR)))
# A number, then perhaps an adjective, then things that are counted: `errors.quantity` knows "1 file" from "2 files".
COUNTABLE = re.compile(
    r" (?:(?!of|for|in|by|on|to|lists)[\w-]+ )?(?:arrays|axes|blocks|bytes|characters|checks|columns|digits|elements"
    r"|entries|experts|files|folders|frequencies|GPUs|groups|heads|items|iterations|keys|layers|levels|lines|masters"
    r"|modules|norms|parameters|processes|ranks|records|rows|samples|scales|shards|steps|tensors|tokens|weights)\b"
)
# The decorator of functions that a framework's callers call with the parameters of its own.
KEEPS_SIGNATURE = "keeps_signature"
MOST_LINES, MOST_PARAMETERS, MOST_LINES_OF_A_FILE = 60, 7, 350
LIMITS = {
    "functions with a local name that says nothing": 58,
    "functions named by a preposition": 4,
    "functions named by a participle alone": 0,
    "tuple assignments of unrelated values": 0,
    "lines exempt from the formatter": 40,
    "functions with more than seven parameters": 0,
    "functions of more than sixty lines": 0,
    "files of more than 350 lines": 0,
    "numbers before a plural without errors.quantity": 18,
}


@dataclass(frozen=True)
class Place:
    """Where a habit was found."""

    habit: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.habit}"


def places(folder: Path = PACKAGE) -> Iterator[Place]:
    """Yield every place in the modules of a folder."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(folder.parent))
        for habit, line in _of_module(text):
            yield Place(habit, name, line)


def counts(folder: Path = PACKAGE) -> dict[str, int]:
    """Return the number of places of each habit."""
    counted = dict.fromkeys(LIMITS, 0)
    for place in places(folder):
        counted[place.habit] += 1
    return counted


def _of_module(text: str) -> Iterator[tuple[str, int]]:
    lines = text.splitlines()
    if len(lines) > MOST_LINES_OF_A_FILE:
        yield "files of more than 350 lines", 1
    for number, line in enumerate(lines, 1):
        if line.endswith("# fmt: skip"):
            yield "lines exempt from the formatter", number
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr) and _counts_by_itself(node):
            yield "numbers before a plural without errors.quantity", node.lineno
        if isinstance(node, ast.Assign) and _assigns_unrelated(node):
            yield "tuple assignments of unrelated values", node.lineno
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for habit in _of_function(node):
                yield habit, node.lineno


def _assigns_unrelated(node: ast.Assign) -> bool:
    """Return whether `a, b = x, y`: two statements on one line. An exchange, `a, b = b, a`, is one."""
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    assigned = {ast.unparse(element) for element in target.elts}
    used = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, (ast.Name, ast.Attribute))}
    return not assigned & used


def _counts_by_itself(node: ast.JoinedStr) -> bool:
    """Return whether `f"{number} files"`; constants, all greater than one, may."""
    pairs = zip(node.values, node.values[1:], strict=False)
    return any(
        isinstance(value, ast.FormattedValue)
        and not ast.unparse(value.value).lstrip("_").isupper()
        and isinstance(text, ast.Constant)
        and COUNTABLE.match(str(text.value)) is not None
        for value, text in pairs
    )


def _of_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    arguments = function.args
    named = {part.arg for part in ast.walk(function) if isinstance(part, ast.arg)}
    named |= {part.id for part in ast.walk(function) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    if named & EMPTY_NAMES:
        yield "functions with a local name that says nothing"
    name = function.name.lstrip("_")
    if name.startswith(tuple(f"{word}_" for word in PREPOSITIONS)) and not name.startswith(ACCEPTED):
        yield "functions named by a preposition"
    if PARTICIPLE.fullmatch(name) and not any("property" in text for text in map(ast.unparse, function.decorator_list)):
        yield "functions named by a participle alone"
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    is_free = KEEPS_SIGNATURE not in map(ast.unparse, function.decorator_list)
    if is_free and len([part for part in parameters if part.arg not in ("self", "cls")]) > MOST_PARAMETERS:
        yield "functions with more than seven parameters"
    if (function.end_lineno or 0) - function.lineno >= MOST_LINES:
        yield "functions of more than sixty lines"


def too_frequent(counted: dict[str, int]) -> list[str]:
    """Return the habits that are more frequent than their limits allow."""
    return [habit for habit, count in counted.items() if count > LIMITS[habit]]


def main() -> int:
    """Print the counts; return 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--places", action="store_true", help="print every place")
    if parser.parse_args().places:
        print(*places(), sep="\n")
    counted = counts()
    for habit, count in counted.items():
        print(f"{count:6,} of at most {LIMITS[habit]:,} {habit}")
    return int(bool(too_frequent(counted)))


if __name__ == "__main__":
    raise SystemExit(main())
