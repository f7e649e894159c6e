"""A plugin of pytest that records which functions of the package each test enters, and how long the test takes.

    REACHED_FUNCTIONS=FOLDER python -m pytest -p reached_functions tests

Each process appends a line of JSON a test to a file of its own in the folder. What a test starts in other processes
is not seen, nor what a fixture of several tests does, except in the first of them. Needs Python 3.12
(`sys.monitoring`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

VARIABLE = "REACHED_FUNCTIONS"
_TOOL = sys.monitoring.COVERAGE_ID
_ENTRY = sys.monitoring.events.PY_START
_PACKAGE = str(Path(__file__).parents[1] / "mcore_ckpt_ext")

Function = tuple[str, str]
"""A function: the path of its module, relative to the repository, and its qualified name (`Class.method`)."""


@dataclass(frozen=True)
class ReachingTest:
    """A test that enters a function.

    Attributes:
        name: its node identifier.
        seconds: how long it took, with its fixtures.
    """

    name: str
    seconds: float


class Recorder:
    """Records the functions that are entered; each is reported once a test, so that the rest costs nothing."""

    def __init__(self) -> None:
        self.entered: set[Function] = set()
        sys.monitoring.use_tool_id(_TOOL, __name__)
        sys.monitoring.register_callback(_TOOL, _ENTRY, self._enter)
        sys.monitoring.set_events(_TOOL, _ENTRY)

    def _enter(self, code: CodeType, offset: int) -> object:
        if code.co_filename.startswith(_PACKAGE):
            path = Path(code.co_filename).relative_to(Path(_PACKAGE).parent).as_posix()
            self.entered.add((path, code.co_qualname))
        return sys.monitoring.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Write down what one test enters."""
        self.entered.clear()
        sys.monitoring.restart_events()
        started = time.monotonic()
        try:
            return (yield)
        finally:
            line = {"test": item.nodeid, "seconds": time.monotonic() - started, "entered": sorted(self.entered)}
            with Path(os.environ[VARIABLE], f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Begin, where the variable names a folder."""
    if VARIABLE in os.environ:
        config.pluginmanager.register(Recorder())


def reaching_tests(folder: Path) -> Mapping[Function, list[ReachingTest]]:
    """Read what a run of the tests recorded: the tests that enter each function."""
    found: dict[Function, list[ReachingTest]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            test = ReachingTest(record["test"], record["seconds"])
            for path_of_module, function in record["entered"]:
                found.setdefault((path_of_module, function), []).append(test)
    return found
