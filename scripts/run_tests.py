"""The test command: makes its own environment, then runs the linters and all tests in it.

    python3 scripts/run_tests.py                        everything
    python3 scripts/run_tests.py --quick                what needs no running job: minutes
    python3 scripts/run_tests.py [pytest arguments]     the tests that these name

Checkouts of Megatron-LM named by MEGATRON_LM_PATH, and of ColossalAI named by COLOSSALAI_PATH, are tested, too; without
them those tests say that they were skipped. ColossalAI's tests run in an environment of their own beside the first,
since it wants an older transformers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from environment import REPOSITORY, SetupError, prepared, prepared_beside

CHECKS = (
    ("ruff", ["-m", "ruff", "check", "."]),
    ("mypy", ["-m", "mypy"]),
    ("import-linter", ["-c", "from importlinter.cli import lint_imports_command as lint; lint()"]),
)
JOBS, COLOSSALAI = "tests/jobs", "tests/colossalai"
# Few tests keep two cores busy, so there are two lanes. These are the second, beside all others: with jobs, without.
SECOND_OF_ALL = (
    "tests/jobs/versions", "tests/huggingface", "tests/jobs/test_huggingface_trained.py",
    "tests/jobs/test_huggingface_witness.py", "tests/jobs/test_saving.py", "tests/jobs/test_parallelism.py",
    "tests/jobs/test_models.py",
)  # fmt: skip
SECOND_OF_QUICK = ("tests/huggingface", "tests/fuzz", "tests/cli", "tests/hooks")

Lane = Callable[[IO[str] | None], list[int]]


def main() -> int:
    """Run what was asked for; the exit status is that of the first check that failed, else pytest's."""
    arguments = sys.argv[1:]
    quick = arguments == ["--quick"]
    print("installing the test environments (.venv*): about three minutes and 6 GB on a fresh machine", flush=True)
    started = time.monotonic()
    log = REPOSITORY / ".venv-install.log"
    try:
        python = prepared(REPOSITORY / ".venv", "demo,test", log)
        beside = None if quick else prepared_beside(python, REPOSITORY / ".venv-colossalai", log)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"installed in {time.monotonic() - started:.0f} s", flush=True)
    for name, command in CHECKS:
        print(f"== {name}", flush=True)
        status = subprocess.run([python, *command], cwd=REPOSITORY, check=False).returncode
        if status:
            return status
    # Both lanes share what they unpack of tests/data (tests/harness/checkpoints.py).
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as unpacked:
        os.environ["TEST_DATA_UNPACKED"] = unpacked
        if beside is None:
            return _quick(python)
        if not arguments:
            return _everything(python, beside)
        return _pytest(beside if any(COLOSSALAI in argument for argument in arguments) else python, arguments)


def _everything(python: Path, beside: Path) -> int:
    """All tests; those of ColossalAI, which the main environment leaves out by itself, begin the second lane."""
    return _in_two_lanes(
        lambda output: [_pytest(python, _without(SECOND_OF_ALL), output)],
        lambda output: [_pytest(beside, [COLOSSALAI], output), _pytest(python, SECOND_OF_ALL, output)],
    )


def _quick(python: Path) -> int:
    """All tests but those with running jobs."""
    return _in_two_lanes(
        lambda output: [_pytest(python, _without((JOBS, *SECOND_OF_QUICK)), output)],
        lambda output: [_pytest(python, SECOND_OF_QUICK, output)],
    )


def _in_two_lanes(first: Lane, second: Lane) -> int:
    """Run both at the same time; the second's output comes at the end."""
    with tempfile.TemporaryFile("w+") as output, ThreadPoolExecutor(1) as executor:
        print("== pytest", flush=True)
        later = executor.submit(second, output)
        statuses = [*first(None), *later.result()]
        output.seek(0)
        print(f"== pytest, second lane\n{output.read()}", flush=True)
    return next((status for status in statuses if status), 0)


def _without(paths: Sequence[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


def _pytest(python: Path, arguments: Sequence[str], output: IO[str] | None = None) -> int:
    command = [python, "-m", "pytest", "-rs", "--durations=10", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, stdout=output, stderr=output, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
