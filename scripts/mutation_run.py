"""Checks that tests fail when the code is wrong, by mutations of randomly chosen functions.

    python scripts/mutation_run.py [--functions 100] [--seed N] [--processes 2] [--only PATTERN] [--reached FOLDER]

Each chosen function is changed in one place (a comparison turned round, a condition negated, a number shifted, a result
replaced by None, ...) in a copy of the repository, and the tests of `run_tests.py --quick` that can notice it run there
until one fails: those that enter the function, the nearest and quickest first, then those of the nearest files that
start other processes. A change that no test notices is printed with its line: it needs a test, or a reason. At the end,
the tests that noticed a change run once more without it, and a change is not counted if its test fails then, too. Run
it with the Python of an environment where the tests run (`.venv/bin/python`). Exit status: 0 if at least nine of ten
changes were noticed, 1 otherwise.

Which tests enter which function is recorded first (`reached_functions.py`), in minutes; `--reached` names a folder for
the record, which is used if it is there. The processes that run tests are forked from this one, which has imported
torch.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from queue import Queue

from changed_tests import NEEDS_A_JOB, importers, rings_of_tests
from forked_tests import failed_tests, import_slow_modules
from mutants import Mutant, mutants
from reached_functions import VARIABLE, Function, RecordedTest, recorded_tests
from run_tests import QUICK

REPOSITORY = Path(__file__).resolve().parents[1]
ENOUGH = 0.9
# Tests of a change run in two groups, each of at most so many tests, or until they take so many seconds.
_GROUPS = ((40, 30.0), (400, 120.0))


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
        Path(folder).chmod(0o755)  # some tests become another user
        copies = [_copied(Path(folder, str(index))) for index in range(options.processes)]
        recorded = _recorded(copies[0], options.reached or Path(folder, "reached"))
        tests = _Tests(importers(REPOSITORY), *recorded)
        import_slow_modules()
        context = get_context("fork")
        free = context.Queue()
        for one in copies:
            free.put(one)
        with ProcessPoolExecutor(options.processes, context, _take_copy, (free, tests)) as executor:
            noticing = list(executor.map(_noticing_test, sample, range(len(sample))))
        broken = _broken(copies[0], noticing)
    for test in sorted(broken):
        print(f"fails without a change, too: {test}")
    noticed = sum(test is not None and test not in broken for test in noticing)
    print(f"{noticed} of {len(sample)} changes were noticed (seed {options.seed})")
    return 0 if noticed >= ENOUGH * len(sample) else 1


def _broken(where: Path, noticing: Iterable[str | None]) -> set[str]:
    """Return those tests that also fail without a change."""
    names = {test for test in noticing if test and "::" in test}
    return set(failed_tests(where, names, 60 + 60.0 * len(names), at_most=0)) if names else set()


def _copied(to: Path) -> Path:
    """Copy the tracked files of the repository; the data of the tests is linked."""
    files = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, check=True, text=True, stdout=subprocess.PIPE).stdout
    for name in files.splitlines():
        if not name.startswith("tests/data/") and (REPOSITORY / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, to / name)
    (to / "tests/data").symlink_to(REPOSITORY / "tests/data")
    return to


def _recorded(where: Path, folder: Path) -> tuple[list[RecordedTest], frozenset[Function]]:
    """Return the recorded tests, and the functions that their import enters; run them, if the folder is not there."""
    if not folder.exists():
        folder.mkdir(parents=True)
        environment = {**os.environ, "PYTHONPATH": f"{where}:{where / 'scripts'}", VARIABLE: str(folder)}
        options = ["-q", "-n2", "--dist=worksteal", "-p", "reached_functions", *QUICK]
        command = [sys.executable, "-m", "pytest", *options]
        started = time.monotonic()
        subprocess.run(command, cwd=where, env=environment, check=False, stdout=subprocess.DEVNULL)
        print(f"recorded the functions that tests enter in {time.monotonic() - started:.0f} s", flush=True)
    return recorded_tests(folder)


@dataclass(frozen=True)
class _Tests:
    """Which tests concern a change.

    Attributes:
        importing: the files that import each module (`changed_tests.importers`).
        recorded: the tests whose functions are known.
        imported: the functions that the import of tests enters.
    """

    importing: Mapping[str, Set[str]]
    recorded: Sequence[RecordedTest]
    imported: Set[Function]

    def groups(self, mutant: Mutant) -> Iterator[list[RecordedTest]]:
        """Yield groups of tests that can notice a change: the nearest and quickest first."""
        function = mutant.path, mutant.function
        nearest = {file: number for number, ring in enumerate(self._rings(mutant)) for file in ring}

        def order(test: RecordedTest) -> tuple[bool, int, float]:
            return function not in test.entered, nearest.get(_file(test.name), len(nearest)), test.seconds

        def can_notice(test: RecordedTest) -> bool:
            near = _file(test.name) in nearest
            return function in test.entered or near and (test.starts_processes or function in self.imported)

        left = sorted(filter(can_notice, self.recorded), key=order)
        for most, seconds in _GROUPS:
            group: list[RecordedTest] = []
            while left and len(group) < most and (not group or sum(one.seconds for one in group) < seconds):
                group.append(left.pop(0))
            if group:
                yield group

    def _rings(self, mutant: Mutant) -> list[list[str]]:
        """Return the files of the nearest two rings of tests."""
        rings = (ring for ring in rings_of_tests([mutant.path], self.importing, NEEDS_A_JOB) if ring)
        return [ring for _, ring in zip(range(2), rings, strict=False)]


def _file(test: str) -> str:
    return test.partition("::")[0]


_copy: Path
_tests: _Tests


def _take_copy(free: Queue[Path], tests: _Tests) -> None:
    """Begin a process of the pool: it has a copy of the repository to itself."""
    global _copy, _tests
    _copy, _tests = free.get(), tests


def _noticing_test(mutant: Mutant, number: int) -> str | None:
    """Return a test that fails with the change, or None."""
    changed, begun = _copy / mutant.path, time.monotonic()
    changed.write_text(mutant.source, encoding="utf-8")
    os.utime(changed, (number, number))  # what is compiled of it is not taken for that of another change
    where = f"{mutant.path}:{mutant.line} {mutant.function}"
    try:
        test = next((failed for failed in _failures(mutant) if failed), None)
        seconds = f"{time.monotonic() - begun:.0f} s"
        if test:
            print(f"noticed   {where} ({seconds}): {test}", flush=True)
        else:
            print(f"SURVIVED  {where} ({seconds}): {mutant.change}", flush=True)
        return test
    finally:
        shutil.copy2(REPOSITORY / mutant.path, changed)


def _failures(mutant: Mutant) -> Iterator[str | None]:
    """Run one group of tests after the other; yield the test that fails in it, or None."""
    for group in _tests.groups(mutant):
        limit = 120 + 5 * sum(test.seconds for test in group)
        yield next(iter(failed_tests(_copy, {test.name for test in group}, limit)), None)


if __name__ == "__main__":
    raise SystemExit(main())
