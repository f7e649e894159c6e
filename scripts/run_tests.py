"""The test command: makes its own environment, then runs the linters and all tests in it.

    python3 scripts/run_tests.py [pytest arguments]

Checkouts of Megatron-LM named by MEGATRON_LM_PATH, and of ColossalAI named by COLOSSALAI_PATH, are tested, too; without
them those tests say that they were skipped. ColossalAI's tests run in an environment of their own beside the first,
since it wants an older transformers; with arguments, only the tests that these name are run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from environment import REPOSITORY, SetupError, prepared, prepared_beside

CHECKS = (
    ("ruff", ["-m", "ruff", "check", "."]),
    ("mypy", ["-m", "mypy"]),
    ("import-linter", ["-c", "from importlinter.cli import lint_imports_command as lint; lint()"]),
)


def main() -> int:
    """Run everything; the exit status is that of the first check that failed, else pytest's."""
    print("installing the test environments (.venv*): about three minutes and 6 GB on a fresh machine", flush=True)
    started = time.monotonic()
    log = REPOSITORY / ".venv-install.log"
    try:
        python = prepared(REPOSITORY / ".venv", "demo,test", log)
        python_of_colossalai = prepared_beside(python, REPOSITORY / ".venv-colossalai", log)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"installed in {time.monotonic() - started:.0f} s", flush=True)
    for name, arguments in CHECKS:
        print(f"== {name}", flush=True)
        status = subprocess.run([python, *arguments], cwd=REPOSITORY, check=False).returncode
        if status:
            return status
    arguments = sys.argv[1:]
    about_colossalai = any("tests/colossalai" in argument for argument in arguments)
    status = 0
    if not about_colossalai:
        print("== pytest", flush=True)
        status = _pytest(python, *arguments)
    if about_colossalai or not arguments:
        print("== pytest, with ColossalAI", flush=True)
        status = _pytest(python_of_colossalai, *(arguments or ["tests/colossalai"])) or status
    return status


def _pytest(python: Path, *arguments: str) -> int:
    command = [python, "-m", "pytest", "-rs", "--durations=10", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
