"""The test command: makes its own environment, then runs the linters and all tests in it.

    python3 scripts/run_tests.py [pytest arguments]

Checkouts of Megatron-LM named by MEGATRON_LM_PATH, and of ColossalAI named by COLOSSALAI_PATH, are tested, too; without
them those tests say that they were skipped. ColossalAI's tests run in an environment of their own beside the first,
since it wants an older transformers; with arguments, only the tests that these name are run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from environment import REPOSITORY, SetupError, prepared, prepared_beside

CHECKS = (
    ("ruff", ["-m", "ruff", "check", "."]),
    ("mypy", ["-m", "mypy"]),
    ("import-linter", ["-c", "from importlinter.cli import lint_imports_command as lint; lint()"]),
)
# Beside all others, in the main environment; tests/colossalai is left out there by itself.
SECOND_LANE = (
    "tests/versions", "tests/huggingface", "tests/online/test_saving.py", "tests/online/test_parallelism.py",
    "tests/test_models_online.py",
)  # fmt: skip


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
    if not sys.argv[1:]:
        return _everything(python, python_of_colossalai)
    about_colossalai = any("tests/colossalai" in argument for argument in sys.argv[1:])
    return _pytest(python_of_colossalai if about_colossalai else python, *sys.argv[1:])


def _everything(python: Path, python_of_colossalai: Path) -> int:
    """All tests in two lanes, since few of them keep two cores busy; the second's output comes at the end."""
    with tempfile.TemporaryFile("w+") as output, ThreadPoolExecutor(1) as second_lane:

        def run_second_lane() -> list[int]:
            colossalai = _pytest(python_of_colossalai, "tests/colossalai", output=output)
            return [colossalai, _pytest(python, *SECOND_LANE, output=output)]

        second = second_lane.submit(run_second_lane)
        print("== pytest", flush=True)
        first = _pytest(python, *(f"--ignore={path}" for path in SECOND_LANE))
        statuses = [first, *second.result()]
        output.seek(0)
        print(f"== pytest, with ColossalAI, then {', '.join(SECOND_LANE)}\n{output.read()}", flush=True)
    return next((status for status in statuses if status), 0)


def _pytest(python: Path, *arguments: str, output: IO[str] | None = None) -> int:
    command = [python, "-m", "pytest", "-rs", "--durations=10", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, stdout=output, stderr=output, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
