"""The first line of a docstring stands alone, as an editor shows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mcore_ckpt_ext

PACKAGE = Path(mcore_ckpt_ext.__file__).parent
FRAGMENTS = re.compile(r"(Of|Such|That of|Whether it|What can be chosen|What is known|What the user states)\b")
LONGEST = 118


def first_lines(source: str) -> Iterator[tuple[int, str]]:
    """The first line of each docstring of a module, with the line of what it documents."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text.partition("\n")[0]


def mistakes(line: str) -> str:
    """What is wrong with a first line; empty if nothing is."""
    if FRAGMENTS.match(line):
        return f"a fragment: {line}"
    if "stranger" in line:
        return f"say 'untrusted': {line}"
    return f"too long: {line}" if len(line) > LONGEST else ""


def test_first_lines_stand_alone() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {wrong}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in first_lines(path.read_text(encoding="utf-8"))
        if (wrong := mistakes(line))
    ]
    assert found == []


@pytest.mark.parametrize("line", ["Of its records.", "Such a folder.", "Whether it is so now.", "x" * 119])
def test_what_is_found(line: str) -> None:
    assert mistakes(line)


@pytest.mark.parametrize("line", ["Names of the records.", "Whether the model has MTP layers.", "Office hours."])
def test_what_is_not(line: str) -> None:
    assert not mistakes(line)
