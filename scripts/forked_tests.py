"""Runs tests in a process that is forked from one which has imported what takes long: for `mutation_run.py`."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence, Set
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
_FAILED, _INTERRUPTED = 1, 2  # of pytest's exit statuses: a test failed; a file could not be imported


def import_slow_modules() -> None:
    """Import what tests import, but nothing of this package, which torch would load by its entry point."""
    os.environ[_WITHOUT_THE_PACKAGE] = "0"
    for name in _SLOW_MODULES:
        importlib.import_module(name)
    del os.environ[_WITHOUT_THE_PACKAGE]


class _Only:
    """A plugin of pytest that keeps the tests of these names."""

    def __init__(self, names: Set[str]) -> None:
        self._names = names

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._names]


def fails(repository: Path, files: Sequence[str], limit: float, only: Set[str] = frozenset()) -> bool:
    """Run tests until one fails; return whether one does, or they take longer than a limit.

    Args:
        repository: the copy of the repository to test.
        files: of tests, relative to it.
        limit: in seconds.
        only: the names of the tests; all of the files if empty.
    """
    temporary = tempfile.mkdtemp(prefix="forked-")
    process = get_context("fork").Process(target=_run, args=(repository, temporary, files, only))
    process.start()
    try:
        process.join(limit)
        return process.exitcode in (None, _FAILED, _INTERRUPTED)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # where it had not begun a session yet
        process.join()
        shutil.rmtree(temporary, ignore_errors=True)


def _run(repository: Path, temporary: str, files: Sequence[str], only: Set[str]) -> None:
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
        plugins = [_Only(only)] if only else []
        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *files], plugins))
    finally:
        os._exit(code)
