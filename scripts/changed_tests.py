"""Finds the tests nearest to a change by imports, for `run_tests.py --changed`.

The nearest tests of a module are those that import it. If there are none, they are the nearest tests of the modules
that import it, and so on. Not all tests that could fail are found, and none in `tests/jobs`.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path

PACKAGE = "mcore_ckpt_ext"
_NAMED = re.compile(rf"{PACKAGE}(\.\w+)+(:\w+|\.)?")
NEEDS_A_JOB = ("tests/jobs/", "tests/colossalai/", "tests/slow/")


def changed_files(repository: Path) -> list[str]:
    """Return the paths that differ from the main branch (`origin/main` if there is one), or that are not tracked."""

    def lines(*command: str) -> list[str]:
        done = subprocess.run(["git", *command], cwd=repository, check=True, text=True, stdout=subprocess.PIPE)
        return done.stdout.splitlines()

    main = lines("for-each-ref", "--format=%(refname)", "refs/remotes/origin/main", "refs/heads/main")[-1]
    base = lines("merge-base", "HEAD", main)[0]
    return sorted({*lines("diff", "--name-only", base), *lines("ls-files", "--others", "--exclude-standard")})


def imported_modules(source: str) -> Iterator[str]:
    """Yield the modules that a source imports; for `from a import b` both `a` and `a.b`, which may be a module.

    Imports by name count as well: a string `mcore_ckpt_ext.a.b` (or `mcore_ckpt_ext.a.b:function`), and the beginning
    `mcore_ckpt_ext.a.` of a formatted string, which stands for all modules of that package.

    Raises:
        ValueError: the source has a relative import, which this repository does not use.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module is None or node.level:
                raise ValueError("relative imports are not used here")
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAMED.fullmatch(node.value):
            yield node.value.partition(":")[0]


def module_of(path: str) -> str:
    """Return the dotted name of the module in a file: `mcore_ckpt_ext.errors` of `mcore_ckpt_ext/errors.py`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def importers(repository: Path) -> dict[str, set[str]]:
    """Return, for each module of the package and of the tests, the files that import it."""
    found: dict[str, set[str]] = {}
    for folder in (PACKAGE, "tests"):
        for path in (repository / folder).rglob("*.py"):
            name = path.relative_to(repository).as_posix()
            for module in imported_modules(path.read_text(encoding="utf-8")):
                if module.endswith("."):
                    for sibling in (repository / module.replace(".", "/")).glob("*.py"):
                        found.setdefault(f"{module}{sibling.stem}", set()).add(name)
                elif module.partition(".")[0] in (PACKAGE, "tests"):
                    found.setdefault(module, set()).add(name)
    return found


def nearest_tests(changed: Iterable[str], importing: Mapping[str, Set[str]]) -> list[str]:
    """Return the test files nearest to some changed files.

    Args:
        changed: paths of files, relative to the repository.
        importing: the files that import each module, as `importers` returns them.
    """
    return sorted({test for path in changed for test in next(rings_of_tests([path], importing), [])})


def rings_of_tests(
    changed: Sequence[str], importing: Mapping[str, Set[str]], without: tuple[str, ...] = NEEDS_A_JOB
) -> Iterator[list[str]]:
    """Yield the test files for some changed files, the nearest first.

    The first ring has the changed tests, or the tests that import a changed file through the fewest other modules. Each
    following ring has one more module in between. A ring is empty if all of its tests are left out.

    Args:
        changed: paths of files, relative to the repository.
        importing: the files that import each module, as `importers` returns them.
        without: folders whose tests are left out, unless they have changed themselves.
    """
    around = {path for path in changed if path.endswith(".py")}
    seen = set(around)
    while around:
        tests = {one for one in around if _is_test(one)}
        if tests:
            yield sorted(test for test in tests if test in changed or not test.startswith(without))
        around = {file for one in around for file in importing.get(module_of(one), ())} - seen
        seen |= around


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_")
