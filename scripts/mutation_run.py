"""Checks that tests fail when the code is wrong, by mutations of randomly chosen functions.

    python scripts/mutation_run.py [--functions 100] [--seed N] [--processes 2] [--only PATTERN]

Each chosen function is changed in one place (a comparison turned round, a condition negated, a number shifted, a result
replaced by None, ...) in a copy of the repository, and the tests nearest to its module run there, as
`run_tests.py --changed` would, and ColossalAI's; then, while none fails, those of the modules that import it. A change
that no test notices is printed with its line: it needs a test, or a reason. Run it with the Python of an environment
where the tests run (`.venv/bin/python`). Exit status: 0 if at least nine of ten changes were noticed, 1 otherwise.
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
from collections.abc import Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from changed_tests import PACKAGE, importers, rings_of_tests

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT = 600.0  # seconds of one run of tests; a change that exceeds it counts as noticed
ENOUGH = 0.9
_LEFT_OUT = ("tests/jobs/", "tests/slow/")
_COLOSSALAI = "tests/colossalai/"

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
        function: name of the function.
        line: line of the change.
        change: the former and the new code.
        source: source of the whole module, with the change.
    """

    path: str
    function: str
    line: int
    change: str
    source: str


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield the functions and methods of a module, except protocols, abstract methods and overloads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(changes(node)):
            names = {getattr(one, "id", getattr(one, "attr", "")) for one in node.decorator_list}
            if not names & {"overload", "abstractmethod"}:
                yield node


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
            found += [(name, node.name, node.lineno) for node in functions(tree)]
    return [_changed(repository, chosen, *one) for one in chosen.sample(found, min(count, len(found)))]


def _changed(repository: Path, chosen: random.Random, path: str, name: str, line: int) -> Mutant:
    source = (repository / path).read_text(encoding="utf-8")
    function = next(one for one in functions(ast.parse(source)) if one.name == name and one.lineno == line)
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
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    importing = importers(REPOSITORY)
    sample = mutants(REPOSITORY, asked.functions, asked.seed, asked.only)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copies: Queue[Path] = Queue()
        for index in range(asked.processes):
            copies.put(_copied(Path(folder, str(index))))
        with ThreadPoolExecutor(asked.processes) as executor:
            noticed = list(executor.map(lambda one: _noticed(one, importing, copies), sample))
    share = sum(noticed) / len(noticed)
    print(f"{sum(noticed)} of {len(noticed)} changes were noticed (seed {asked.seed})")
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


def _noticed(mutant: Mutant, importing: Mapping[str, Set[str]], copies: Queue[Path]) -> bool:
    """Return whether a test in the nearest two rings fails with the change."""
    where = copies.get()
    begun, ran = time.monotonic(), 0
    try:
        (where / mutant.path).write_text(mutant.source, encoding="utf-8")
        rings = (ring for ring in rings_of_tests([mutant.path], importing, _LEFT_OUT) if ring)
        for ring, tests in zip(range(2), rings, strict=False):
            ran += len(tests)
            if any(_fails(where, some) for some in _by_environment(tests)):
                print(f"noticed   {mutant.path}:{mutant.line} {mutant.function} (ring {ring + 1}, {ran} files, "
                      f"{time.monotonic() - begun:.0f} s)", flush=True)  # fmt: skip
                return True
        print(f"SURVIVED  {mutant.path}:{mutant.line} {mutant.function}: {mutant.change} ({ran} files)", flush=True)
        return False
    finally:
        shutil.copy2(REPOSITORY / mutant.path, where / mutant.path)
        copies.put(where)


def _by_environment(tests: list[str]) -> list[list[str]]:
    """Divide tests into those of the main environment and those of ColossalAI's, without empty parts."""
    of_colossalai = [test for test in tests if test.startswith(_COLOSSALAI)]
    return [part for part in ([test for test in tests if test not in of_colossalai], of_colossalai) if part]


def _fails(where: Path, tests: list[str]) -> bool:
    environment = {**os.environ, "PYTHONPATH": str(where), "PYTHONDONTWRITEBYTECODE": "1"}
    python = REPOSITORY / ".venv-colossalai/bin/python" if tests[0].startswith(_COLOSSALAI) else sys.executable
    command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=where,
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
