"""Test that the first line of a docstring stands alone, and that docstrings and comments use plain words."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import mcore_ckpt_ext

PACKAGE = Path(mcore_ckpt_ext.__file__).parent
END = re.compile(r"[.:!?]$|\.[\"')]$")
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields):$")
LONGEST = 99
LEADING = re.compile(r"(What|Whether|Of|Such|That of|Those)\b")
WORDS = re.compile(
    r"\b(told|tells?|asks?|asked|knows|believes?|believed|lends?|lent|strangers?|beside|anew|nobody|whoever)\b",
    re.IGNORECASE,
)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Each docstring of a module, without indentation, with the line of what it documents."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def first_lines(source: str) -> Iterator[tuple[int, str]]:
    """The first line of each docstring of a module, with the line of what it documents."""
    for number, text in docstrings(source):
        yield number, text.partition("\n")[0]


def prose(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a module, without code in backticks, with the lines where they begin."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, re.sub(r"`[^`]*`", "", node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], re.sub(r"`[^`]*`", "", token.string)


def mistakes(line: str) -> str:
    """What is wrong with a first line; empty if nothing is."""
    if LEADING.match(line):
        return f"neither a sentence nor a noun phrase: {line}"
    return f"too long: {line}" if len(line) > LONGEST else ""


def sources() -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each module of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE), path.read_text(encoding="utf-8")


def test_first_lines_stand_alone() -> None:
    found = [
        f"{path}:{number}: {wrong}"
        for path, source in sources()
        for number, line in first_lines(source)
        if (wrong := mistakes(line))
    ]
    assert found == []


def unfinished(text: str) -> str:
    """The last line of a paragraph that does not end as a sentence does, as if it was cut off; empty if there is none.

    Indented paragraphs, such as tables and examples, are exempt, but not sections, such as arguments.
    """
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        is_prose = not lines[-1].startswith(" ") or SECTION.match(lines[0])
        if is_prose and not END.search(lines[-1]) and not lines[-1].startswith(("from ", "import ")):
            return lines[-1]
    return ""


def test_paragraphs_end_as_sentences_do() -> None:
    found = [
        f"{path}:{number}: {end}"
        for path, source in sources()
        for number, text in docstrings(source)
        if (end := unfinished(text))
    ]
    assert found == []


def test_docstrings_and_comments_use_plain_words() -> None:
    found = [
        f"{path}:{number}: {match[0]}"
        for path, source in sources()
        for number, text in prose(source)
        for match in WORDS.finditer(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line", ["Of its records.", "Such a folder.", "What it holds.", "Whether it is so.", "x" * 100]
)
def test_mistakes_are_found(line: str) -> None:
    assert mistakes(line)


@pytest.mark.parametrize("line", ["Names of the records.", "Return whether it is so.", "Office hours."])
def test_correct_lines_are_accepted(line: str) -> None:
    assert not mistakes(line)


@pytest.mark.parametrize("source", ['"""The user is told."""', "x = 1  # lies beside it", 'def f():\n    "It knows."'])
def test_banned_words_are_found(source: str) -> None:
    assert [match for _, text in prose(source) for match in WORDS.finditer(text)]


@pytest.mark.parametrize("source", ['x = "told"', "told = 1", '"""The name `told`."""', '"""It is unknown."""'])
def test_code_is_not_prose(source: str) -> None:
    assert not [match for _, text in prose(source) for match in WORDS.finditer(text)]


@pytest.mark.parametrize("text", ["It calls `save`", "Done.\n\nArgs:\n    a: the\n        first", "Names and"])
def test_unfinished_paragraphs_are_found(text: str) -> None:
    assert unfinished(text)


@pytest.mark.parametrize(
    "text", ["It saves.", "Files:\n\n    a.json  names", "Do it (`save`, 0.19.2).\n\nArgs:\n    a: b."]
)
def test_finished_paragraphs_are_not(text: str) -> None:
    assert not unfinished(text)
