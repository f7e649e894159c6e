"""Runs tests in a process that is forked from one which has imported what takes long: for `mutation_run.py`."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Set
from multiprocessing import get_context
from pathlib import Path

import pytest

_SLOW_MODULES = (
    "torch",
    "torch.distributed.checkpoint",
    "hypothesis",
    "safetensors.torch",
)
_WITHOUT_THE_PACKAGE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_FAILURES = "failures"
_NONE_FAILED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def import_slow_modules() -> None:
    """Import what tests import, but nothing of this package, which torch would load by its entry point."""
    os.environ[_WITHOUT_THE_PACKAGE] = "0"
    for name in _SLOW_MODULES:
        importlib.import_module(name)
    del os.environ[_WITHOUT_THE_PACKAGE]


class _Named:
    """A plugin of pytest that keeps the tests of some names, and writes those that fail into a file."""

    def __init__(self, names: Set[str], failures: Path) -> None:
        self._names, self._failures = names, failures

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._names]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._write(report)

    def _write(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            with self._failures.open("a") as file:
                file.write(f"{report.nodeid}\n")


def failed_tests(repository: Path, names: Set[str], limit: float, at_most: int = 1) -> list[str]:
    """Run tests; return the names of those that fail, or a remark if they exceed a limit or end the process.

    Args:
        repository: the copy of the repository to test.
        names: the tests.
        limit: in seconds.
        at_most: after so many failures no other test runs; all run if 0.
    """
    temporary = tempfile.mkdtemp(prefix="forked-")
    failures = Path(temporary, _FAILURES)
    process = get_context("fork").Process(target=_run, args=(repository, temporary, names, at_most))
    process.start()
    try:
        process.join(limit)
        if failures.exists():
            return failures.read_text().splitlines()
        if process.exitcode is None:
            return [f"more than {limit:.0f} s"]
        return [] if process.exitcode in _NONE_FAILED else [f"exit status {process.exitcode}"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # where it had not begun a session yet
        process.join()
        shutil.rmtree(temporary, ignore_errors=True)


def _run(repository: Path, temporary: str, names: Set[str], at_most: int) -> None:
    """Run the tests in the forked process."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.chdir(repository)
    os.environ.update(PYTHONPATH=str(repository), TMPDIR=temporary)
    tempfile.tempdir = None
    sys.path.insert(0, str(repository))
    importlib.invalidate_caches()
    code = 1
    try:
        importlib.import_module("mcore_ckpt_ext_autoload").register()
        files = sorted({name.partition("::")[0] for name in names})
        options = ["-q", f"--maxfail={at_most}", "-p", "no:cacheprovider"]
        code = int(pytest.main([*options, *files], [_Named(names, Path(temporary, _FAILURES))]))
    finally:
        os._exit(code)
