"""The test command: makes its own environment, then runs the linters and all tests in it.

    python3 scripts/run_tests.py [pytest arguments]

Checkouts of Megatron-LM named by MEGATRON_LM_PATH are tested, too; without it those tests say that they were skipped.
"""

from __future__ import annotations

import subprocess
import sys
import time

from environment import REPOSITORY, SetupError, prepared

CHECKS = (
    ("ruff", ["-m", "ruff", "check", "."]),
    ("mypy", ["-m", "mypy"]),
    ("import-linter", ["-c", "from importlinter.cli import lint_imports_command as lint; lint()"]),
)


def main() -> int:
    """Run everything; the exit status is that of the first check that failed, else pytest's."""
    print("installing the test environment (.venv): about two minutes and 5 GB on a fresh machine", flush=True)
    started = time.monotonic()
    try:
        python = prepared(REPOSITORY / ".venv", "demo,test", REPOSITORY / ".venv-install.log")
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"installed in {time.monotonic() - started:.0f} s", flush=True)
    for name, arguments in CHECKS:
        print(f"== {name}", flush=True)
        status = subprocess.run([python, *arguments], cwd=REPOSITORY, check=False).returncode
        if status:
            return status
    print("== pytest", flush=True)
    command = [python, "-m", "pytest", "-rs", "--durations=10", *sys.argv[1:]]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
