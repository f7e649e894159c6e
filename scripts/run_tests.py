"""The test command: creates an environment, then runs the linters and the tests in it.

Jobs of one feature each, what takes long, and most of many alike rows, are marked `nightly`, and run by name or with
`--nightly`.

Checkouts of Megatron-LM named by MEGATRON_LM_PATH, and of ColossalAI named by COLOSSALAI_PATH, are tested, too; without
them those tests are skipped. ColossalAI's tests run in a second environment, because it needs an older transformers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from changed_tests import changed_files, importers, nearest_tests
from environment import REPOSITORY, SetupError, prepared, prepared_beside
from matrix_cell import Cell, add_options, cell_of

CHECKS = (
    ("ruff", ["-m", "ruff", "check", "."]),
    ("ruff format", ["-m", "ruff", "format", "--check", "."]),
    ("mypy", ["-m", "mypy", "--num-workers", "2"]),
    ("import-linter", ["-c", "from importlinter.cli import lint_imports_command as lint; lint()"]),
    # -P: without the current folder on the path, like the program `mkdocs`.
    ("documentation", ["-P", "-m", "mkdocs", "build", "--strict", "--quiet"]),
)
JOBS, COLOSSALAI, PEERS = "tests/jobs", "tests/colossalai", "tests/peers/test_run.py"
# Tests wait for disks and for the slowest rank of a job, so there is one process more than cores. A free process takes
# the next file, and the last files are short. More than four processes would each import Megatron for few files.
PROCESSES = min(len(os.sched_getaffinity(0)) + 1, 4)
IN_TURN = ("-n", str(PROCESSES), "--dist", "loadfile", "--no-loadscope-reorder")
# Without jobs, tests of a file share little, so a free process takes tests from the other.
BALANCED = ("-n", str(PROCESSES), "--dist", "worksteal")
QUICK = ("-m", "not thorough", f"--ignore={JOBS}", f"--ignore={PEERS}")
DAILY = ("-m", "not nightly")


def main(words: Sequence[str]) -> int:
    """Run the requested checks; return the exit status of the first failed check, otherwise pytest's."""
    requested = parsed(words)
    cell, arguments = cell_of(requested), [*requested.tests, *requested.options]
    if cell != Cell():
        return _cell(cell, arguments)
    if requested.changed:
        arguments = nearest_tests(changed_files(REPOSITORY), importers(REPOSITORY))
        if not arguments:
            print("no test imports what has changed")
            return 0
    quick = requested.quick
    print("installing the test environments (.venv*): about three minutes and 6 GB on a fresh machine", flush=True)
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # a warning of the theme about a release of MkDocs that is not used here
    started = time.monotonic()
    log = REPOSITORY / ".venv-install.log"
    try:
        with ThreadPoolExecutor(1) as executor:  # for ColossalAI's environment and tests, in parallel
            python = prepared(REPOSITORY / ".venv", "demo,test,docs", log)
            folder = REPOSITORY / ".venv-colossalai"
            beside = None if quick else executor.submit(prepared_beside, python, folder, log)
            status = _checks(python)
            print(f"installed and checked in {time.monotonic() - started:.0f} s", flush=True)
            if status:
                return status
            with _shared_checkpoints():
                if beside is None:
                    return _pytest(python, [*BALANCED, *QUICK, *requested.options]).returncode
                if arguments:
                    with_colossalai = beside.result()  # also for other tests: a failed installation is no success
                    named = with_colossalai if any(COLOSSALAI in argument for argument in arguments) else python
                    return _pytest(named, arguments).returncode
                # The main environment skips ColossalAI's tests by itself.
                daily = () if requested.nightly else DAILY
                of_colossalai = executor.submit(
                    lambda: _pytest(beside.result(), [COLOSSALAI, *daily], stdout=subprocess.PIPE)
                )
                statuses = [_pytest(python, [*IN_TURN, *daily]).returncode, of_colossalai.result().returncode]
                print(of_colossalai.result().stdout, end="", flush=True)
                return next((status for status in statuses if status), 0)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the command line; `options` are those of pytest.

    Raises:
        SystemExit: an option or a path is unknown, or help was asked for.
    """
    parser = argparse.ArgumentParser(
        prog="scripts/run_tests.py",
        usage="%(prog)s [--quick | --changed | --nightly | TEST ...] [--megatron VERSION] [--python 3.12] "
        "[--torch VERSION] [-- PYTEST-OPTION ...]",
        description="Create an environment (.venv), then run the linters and the tests in it.",
        epilog="Example: scripts/run_tests.py tests/storage -- -x -k fsync",
        allow_abbrev=False,
    )
    parser.add_argument(
        "tests", nargs="*", metavar="TEST", help="files, folders or tests; by default all but `nightly`"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="neither jobs nor `thorough` tests: minutes")
    which.add_argument("--changed", action="store_true", help="the tests nearest to what differs from the main branch")
    which.add_argument("--nightly", action="store_true", help="all rows, and jobs of one feature each: an hour more")
    add_options(parser)
    words, options = list(words), []
    if "--" in words:
        place = words.index("--")
        words, options = words[:place], words[place + 1 :]
    requested = parser.parse_args(words)
    for test in requested.tests:
        if not (REPOSITORY / test.split("::")[0]).exists():
            parser.error(f"there is no {test}")
    if requested.tests and (requested.quick or requested.changed or requested.nightly):
        parser.error("tests are named, or chosen by --quick or --changed, or all by --nightly")
    requested.options = options
    return requested


def _cell(cell: Cell, arguments: Sequence[str]) -> int:
    print("installing the environment of this cell (.venv-*)", flush=True)
    try:
        python = cell.prepared(REPOSITORY / ".venv-install.log")
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2
    os.environ.update(cell.variables)
    with _shared_checkpoints():
        return _pytest(python, arguments or [*IN_TURN, *cell.tests]).returncode


@contextmanager
def _shared_checkpoints() -> Iterator[None]:
    """Share unpacked checkpoints of tests/data between all processes (tests/harness/checkpoints.py)."""
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as unpacked:
        os.environ["TEST_DATA_UNPACKED"] = unpacked
        yield


def _checks(python: Path) -> int:
    """Run the linters in parallel, print their output in order, and return the first failed exit status."""

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), *command],
            cwd=REPOSITORY,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    with ThreadPoolExecutor(len(CHECKS)) as executor:
        running = [executor.submit(run, command) for _, command in CHECKS]
        for (name, _), check in zip(CHECKS, running, strict=True):
            print(f"== {name}\n{check.result().stdout}", end="", flush=True)
    return next((check.result().returncode for check in running if check.result().returncode), 0)


def _pytest(python: Path, arguments: Sequence[str], stdout: int | None = None) -> subprocess.CompletedProcess[str]:
    print("== pytest", *arguments, flush=True)
    # The processes share the cores: threads of torch would wait for each other, as those of the ranks of a job.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [str(python), "-m", "pytest", "-rs", "--durations=15", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, check=False, text=True, stdout=stdout, env=environment)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
