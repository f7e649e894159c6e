"""Checks that tests fail when the code is wrong, by mutations of randomly chosen functions.

    python scripts/mutation_run.py [--functions 100] [--seed N] [--processes 2] [--only PATTERN] [--reached FOLDER]

Each chosen function is changed in one place (a comparison turned round, a condition negated, a number shifted, a result
replaced by None, ...) in a copy of the repository, and tests run there until one fails: first the quickest of those
that enter the function, then all files of tests that are nearest to its module, as in `run_tests.py --changed`, then
those of the modules that import it. A change that no test notices is printed with its line: it needs a test, or a
reason. The processes that run tests are forked from this one, which has imported torch. Run it with the Python of an
environment where the tests run (`.venv/bin/python`). Exit status: 0 if at least nine of ten changes were noticed, 1
otherwise.

Which tests enter which function is recorded first (`reached_functions.py`), by all tests that need no job, in minutes;
`--reached` names a folder for the record, which is used if it is there.
"""

from __future__ import annotations

import argparse
import ast
import copy
import fnmatch
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from queue import Queue

from changed_tests import PACKAGE, importers, rings_of_tests
from forked_tests import fails, import_slow_modules
from reached_functions import VARIABLE, Function, ReachingTest, reaching_tests

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT = 600.0  # seconds of one run of tests; a change that exceeds it counts as noticed
ENOUGH = 0.9
_LEFT_OUT = ("tests/jobs/", "tests/slow/")
_COLOSSALAI = "tests/colossalai/"
# Of the tests that enter a changed function, those that run first: so many, or until they take so many seconds.
_MOST_TESTS, _MOST_SECONDS = 40, 30.0

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True)
class Mutant:
    """A function with one change.

    Attributes:
        path: path of the module, relative to the repository.
        function: qualified name of the function, as in Python (`Class.method`).
        line: line of the change.
        change: the former and the new code.
        source: source of the whole module, with the change.
    """

    path: str
    function: str
    line: int
    change: str
    source: str


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions and methods of a module with their names, except protocols, abstract methods, overloads."""
    for node in ast.iter_child_nodes(tree):
        inside = within
        if isinstance(node, ast.FunctionDef):
            names = {getattr(one, "id", getattr(one, "attr", "")) for one in node.decorator_list}
            if not names & {"overload", "abstractmethod"} and any(changes(node)):
                yield f"{within}{node.name}", node
            inside = f"{within}{node.name}.<locals>."
        elif isinstance(node, ast.ClassDef):
            inside = f"{within}{node.name}."
        yield from functions(node, inside)


def changes(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the places of a function that can be changed, each with its replacement.

    Annotations, docstrings, defaults and the text of messages are left alone: no test should depend on them.
    """
    for statement in function.body:
        for node in _reached(statement):
            changed: ast.AST = copy.deepcopy(node)
            if isinstance(changed, ast.Compare) and len(changed.ops) == 1 and type(changed.ops[0]) in _COMPARISONS:
                changed.ops = [_COMPARISONS[type(changed.ops[0])]()]
            elif isinstance(changed, ast.BoolOp):
                changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
            elif isinstance(changed, ast.BinOp) and type(changed.op) in _ARITHMETIC and not _text(changed):
                changed.op = _ARITHMETIC[type(changed.op)]()
            elif isinstance(changed, (ast.If, ast.While, ast.IfExp)):
                changed.test = ast.UnaryOp(ast.Not(), changed.test)
            elif isinstance(changed, ast.Constant) and type(changed.value) is bool:
                changed.value = not changed.value
            elif isinstance(changed, ast.Constant) and type(changed.value) is int:
                changed.value += 1
            elif isinstance(changed, ast.Return) and not _nothing(changed.value):
                changed.value = ast.Constant(None)
            elif isinstance(changed, ast.Expr) and isinstance(changed.value, ast.Call):
                changed = ast.Pass()
            else:
                continue
            yield node, changed


def _reached(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a node, without those whose change does not affect tests."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, (ast.Raise, ast.JoinedStr)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                yield from _reached(child)


def _text(node: ast.BinOp) -> bool:
    return any(
        isinstance(part, (ast.JoinedStr, ast.List, ast.Tuple)) or _is_str(part) for part in (node.left, node.right)
    )


def _is_str(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _nothing(value: ast.AST | None) -> bool:
    return value is None or isinstance(value, ast.Constant) and value.value is None


def mutants(repository: Path, count: int, seed: int, pattern: str) -> list[Mutant]:
    """Choose functions at random, and one change for each."""
    chosen = random.Random(seed)
    found: list[tuple[str, str, int]] = []
    for path in sorted((repository / PACKAGE).rglob("*.py")):
        name = path.relative_to(repository).as_posix()
        if fnmatch.fnmatch(name, pattern):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [(name, function, node.lineno) for function, node in functions(tree)]
    return [_changed(repository, chosen, *one) for one in chosen.sample(found, min(count, len(found)))]


def _changed(repository: Path, chosen: random.Random, path: str, name: str, line: int) -> Mutant:
    source = (repository / path).read_text(encoding="utf-8")
    function = next(one for found, one in functions(ast.parse(source)) if (found, one.lineno) == (name, line))
    node, changed = chosen.choice(list(changes(function)))
    lines = source.splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1  # type: ignore[attr-defined]
    start, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
    before = lines[first].encode()[:start].decode()
    after = lines[last].encode()[end:].decode()
    indent = "\n" + " " * start
    new = indent.join(ast.unparse(ast.fix_missing_locations(changed)).splitlines())
    new = new if isinstance(node, ast.stmt) else f"({new})"
    text = "".join(lines[:first]) + before + new + after + "".join(lines[last + 1 :])
    ast.parse(text)
    change = f"{_short(ast.unparse(node))}  ->  {_short(new)}"
    return Mutant(path, name, node.lineno, change, text)  # type: ignore[attr-defined]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 70 else f"{line[:67]}..."


def main() -> int:
    """Run the tests for each change, and print unnoticed changes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="*", help="of the paths of the modules")
    parser.add_argument("--reached", type=Path, help="folder for the record of the functions that tests enter")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    sample = mutants(REPOSITORY, options.functions, options.seed, options.only)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copies = [_copied(Path(folder, str(index))) for index in range(options.processes)]
        tests = _Tests(importers(REPOSITORY), _recorded(copies[0], options.reached or Path(folder, "reached")))
        import_slow_modules()
        context = get_context("fork")
        free = context.Queue()
        for one in copies:
            free.put(one)
        with ProcessPoolExecutor(options.processes, context, _take_copy, (free, tests)) as executor:
            noticed = list(executor.map(_noticed, sample, range(len(sample))))
    share = sum(noticed) / len(noticed)
    print(f"{sum(noticed)} of {len(noticed)} changes were noticed (seed {options.seed})")
    return 0 if share >= ENOUGH else 1


def _copied(to: Path) -> Path:
    """Copy the tracked files of the repository; the data of the tests is linked."""
    files = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, check=True, text=True, stdout=subprocess.PIPE).stdout
    for name in files.splitlines():
        if not name.startswith("tests/data/") and (REPOSITORY / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, to / name)
    (to / "tests/data").symlink_to(REPOSITORY / "tests/data")
    return to


def _recorded(where: Path, folder: Path) -> Mapping[Function, list[ReachingTest]]:
    """Return the tests that enter each function; run them all, if the folder is not there."""
    if not folder.exists():
        folder.mkdir(parents=True)
        environment = {**os.environ, "PYTHONPATH": f"{where}:{where / 'scripts'}", VARIABLE: str(folder)}
        left_out = [f"--ignore={name}" for name in (*_LEFT_OUT, _COLOSSALAI, "tests/peers/test_run.py")]
        options = ["-q", "-n2", "--dist=worksteal", "-p", "reached_functions", *left_out]
        command = [sys.executable, "-m", "pytest", *options]
        started = time.monotonic()
        subprocess.run(command, cwd=where, env=environment, check=False, stdout=subprocess.DEVNULL)
        print(f"recorded the functions that tests enter in {time.monotonic() - started:.0f} s", flush=True)
    return reaching_tests(folder)


@dataclass(frozen=True)
class _Tests:
    """Which tests concern a change.

    Attributes:
        importing: the files that import each module (`changed_tests.importers`).
        reaching: the tests that enter each function.
    """

    importing: Mapping[str, Set[str]]
    reaching: Mapping[Function, list[ReachingTest]]

    def rings(self, mutant: Mutant) -> list[list[str]]:
        """Return the files of the nearest two rings of tests."""
        rings = (ring for ring in rings_of_tests([mutant.path], self.importing, _LEFT_OUT) if ring)
        return [ring for _, ring in zip(range(2), rings, strict=False)]

    def quickest(self, mutant: Mutant) -> list[str]:
        """Return the names of tests that enter the function: of the nearest files, and the quickest of these."""
        nearest = {file: number for number, ring in enumerate(self.rings(mutant)) for file in ring}
        tests = self.reaching.get((mutant.path, mutant.function), [])
        chosen, seconds = [], 0.0
        for test in sorted(tests, key=lambda one: (nearest.get(one.name.partition("::")[0], 2), one.seconds)):
            if len(chosen) < _MOST_TESTS and seconds + test.seconds <= _MOST_SECONDS or not chosen:
                chosen.append(test.name)
                seconds += test.seconds
        return chosen


_copy: Path
_tests: _Tests


def _take_copy(free: Queue[Path], tests: _Tests) -> None:
    """Begin a process of the pool: it has a copy of the repository to itself."""
    global _copy, _tests
    _copy, _tests = free.get(), tests


def _noticed(mutant: Mutant, number: int) -> bool:
    """Return whether a test fails with the change."""
    changed, begun = _copy / mutant.path, time.monotonic()
    changed.write_text(mutant.source, encoding="utf-8")
    os.utime(changed, (number, number))  # what is compiled of it is not taken for that of another change
    where = f"{mutant.path}:{mutant.line} {mutant.function}"
    try:
        for stage, failing in enumerate(_stages(mutant)):
            if failing:
                print(f"noticed   {where} (stage {stage}, {time.monotonic() - begun:.0f} s)", flush=True)
                return True
        print(f"SURVIVED  {where}: {mutant.change} ({time.monotonic() - begun:.0f} s)", flush=True)
        return False
    finally:
        shutil.copy2(REPOSITORY / mutant.path, changed)


def _stages(mutant: Mutant) -> Iterator[bool]:
    """Run one group of tests after the other; yield whether one of it fails."""
    if names := _tests.quickest(mutant):
        yield fails(_copy, sorted({name.partition("::")[0] for name in names}), LIMIT, only=frozenset(names))
    for ring in _tests.rings(mutant):
        of_colossalai = [test for test in ring if test.startswith(_COLOSSALAI)]
        others = [test for test in ring if test not in of_colossalai]
        yield bool(others) and fails(_copy, others, LIMIT) or bool(of_colossalai) and _fails_there(of_colossalai)


def _fails_there(tests: Sequence[str]) -> bool:
    """Run tests of ColossalAI, in its environment; return whether one fails."""
    command = [REPOSITORY / ".venv-colossalai/bin/python", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(_copy)}
    try:
        done = subprocess.run(
            command,
            cwd=_copy,
            env=environment,
            check=False,
            timeout=LIMIT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode in (1, 2)


if __name__ == "__main__":
    raise SystemExit(main())
