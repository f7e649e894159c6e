"""A plugin of pytest that records which functions of the package each test enters, and how long the test takes.

    REACHED_FUNCTIONS=FOLDER python -m pytest -p reached_functions tests

Each process appends a line of JSON for each passed test to a file of its own in the folder, and first one for what is
entered while the tests are imported. Processes that a test starts append what they enter
(`recorded_children/sitecustomize.py`), unless they get neither PYTHONPATH nor the name of the test: it is recorded that
there are such processes. What a fixture of several tests does counts for the first of them only. Needs Python 3.12
(`sys.monitoring`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from recorded_children.sitecustomize import write_entered

VARIABLE = "REACHED_FUNCTIONS"
_IMPORT = ""  # the name of the test for what is entered while tests are imported
_TOOL = sys.monitoring.COVERAGE_ID
_ENTRY = sys.monitoring.events.PY_START
_PACKAGE = str(Path(__file__).parents[1] / "mcore_ckpt_ext")
_CHILDREN = str(Path(__file__).parent / "recorded_children")
_STARTED_PROCESS = {"subprocess.Popen", "os.fork", "os.posix_spawn"}  # audit events

Function = tuple[str, str]
"""A function: the path of its module, relative to the repository, and its qualified name (`Class.method`)."""


@dataclass(frozen=True)
class RecordedTest:
    """A test as it was recorded.

    Attributes:
        name: its node identifier.
        seconds: how long it took, with its fixtures.
        entered: the functions that it entered.
        starts_processes: whether it started other processes, which may enter functions that are not recorded.
    """

    name: str
    seconds: float
    entered: frozenset[Function]
    starts_processes: bool


class Recorder:
    """Records the functions that are entered; each is reported once a test, so that the rest costs nothing."""

    def __init__(self) -> None:
        self.entered: set[Function] = set()
        self.starts_processes = False
        self.failed = False
        self._process = os.getpid()
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_CHILDREN, os.environ.get("PYTHONPATH"))))
        self._events = _STARTED_PROCESS  # for the hook, which runs until Python has ended
        sys.addaudithook(self._audit)
        sys.monitoring.use_tool_id(_TOOL, __name__)
        sys.monitoring.register_callback(_TOOL, _ENTRY, self._enter)
        sys.monitoring.set_events(_TOOL, _ENTRY)

    def _enter(self, code: CodeType, offset: int) -> object:
        if os.getpid() != self._process:  # forked by a test
            write_entered(code)
        elif code.co_filename.startswith(_PACKAGE):
            path = Path(code.co_filename).relative_to(Path(_PACKAGE).parent).as_posix()
            self.entered.add((path, code.co_qualname))
        return sys.monitoring.DISABLE

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        self.starts_processes |= event in self._events

    def pytest_unconfigure(self) -> None:
        """End."""
        sys.monitoring.set_events(_TOOL, sys.monitoring.events.NO_EVENTS)

    def pytest_collection_finish(self) -> None:
        """Write down what the import of the tests entered."""
        self._write(_IMPORT, 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Write down what one test enters."""
        self.entered.clear()
        self.starts_processes = self.failed = False
        sys.monitoring.restart_events()
        started = time.monotonic()
        try:
            return (yield)
        finally:
            if not self.failed:
                self._write(item.nodeid, time.monotonic() - started)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure."""
        self.failed |= report.failed

    def _write(self, test: str, seconds: float) -> None:
        line = {
            "test": test,
            "seconds": seconds,
            "entered": sorted(self.entered),
            "starts_processes": self.starts_processes,
        }
        with Path(os.environ[VARIABLE], f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begin where the variable names a folder, before `tests/conftest.py` imports the package."""
    if VARIABLE in os.environ:
        early_config.pluginmanager.register(Recorder())


def recorded_tests(folder: Path) -> tuple[list[RecordedTest], frozenset[Function]]:
    """Return the tests that were recorded in a folder, and the functions that their import entered."""
    passed: dict[str, tuple[float, bool]] = {}
    entered: defaultdict[str, set[Function]] = defaultdict(set)
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            entered[record["test"]] |= {(module, function) for module, function in record["entered"]}
            if "seconds" in record:
                passed[record["test"]] = record["seconds"], record["starts_processes"]
    imported = frozenset(entered[_IMPORT])
    tests = [
        RecordedTest(name, seconds, frozenset(entered[name]), starts_processes)
        for name, (seconds, starts_processes) in passed.items()
        if name != _IMPORT
    ]
    return tests, imported
