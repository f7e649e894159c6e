"""What tests share lies in `tests/harness`: no test imports another test, no folder of tests imports another one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
HARNESS = ("tests", "harness")


def imported(source: str) -> Iterator[tuple[str, ...]]:
    """The modules that a source imports, as their parts; of `from a import b` both `a` and `a.b`, which may be one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = tuple((node.module or "").split("."))
            assert not node.level, "relative imports are not used here"
            yield module
            yield from ((*module, alias.name) for alias in node.names)


def mistakes(path: Path, source: str) -> list[str]:
    """The imports of a file below `tests` that it must not have."""
    folder = ("tests", *path.relative_to(TESTS).parent.parts)
    found = []
    for module in imported(source):
        is_test = module[0] == "tests" and any(part.startswith(("test_", "conftest")) for part in module)
        is_own = len(folder) > 1 and module[: len(folder)] == folder
        is_elsewhere = len(module) > 1 and module[0] == "tests" and not is_own and module[:2] != HARNESS
        if is_test or is_elsewhere:
            found.append(".".join(module))
    return found


def test_tests_share_the_harness_and_nothing_else() -> None:
    found = {str(path.relative_to(TESTS)): mistakes(path, path.read_text()) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("test_one.py", "from tests.test_other import helper"),
        ("test_one.py", "import tests.jobs.versions.matrix"),
        ("jobs/test_one.py", "def late():\n    from tests.huggingface import models"),
        ("jobs/test_one.py", "from tests.conftest import fixture"),
        ("harness/one.py", "from tests.jobs import conftest"),
    ],
)
def test_what_it_finds(path: str, source: str) -> None:
    assert mistakes(TESTS / path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("test_one.py", "from tests.harness.jobs import run_job"),
        ("fuzz/test_one.py", "from tests.fuzz import edits"),
        ("jobs/versions/test_one.py", "from tests.jobs.versions.matrix import Shown"),
        ("test_one.py", "import pytest"),
    ],
)
def test_what_it_allows(path: str, source: str) -> None:
    assert not mistakes(TESTS / path, source)
