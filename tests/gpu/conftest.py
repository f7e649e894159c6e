"""All tests of this folder need a GPU. They end in time, and leave their figures in files.

`--seconds N`: no test begins later, and what runs then is ended. `--figures FOLDER`: a line for each test and each
figure, as soon as it is there, and the reports of the self-test: what a command that is killed leaves, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_ckpt_ext.devices import accelerator_type

HERE = Path(__file__).parent
STARTED = time.monotonic()
# What matters most comes first.
ORDER = ("test_selftest", "test_collectives", "test_device", "test_resume", "test_colossalai", "test_loading")
LINES = "figures.txt"
_folders: list[Path] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, default=float("inf"), help="end after this time")
    parser.addoption("--figures", type=Path, help="folder for figures and reports")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--figures", None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        _folders.append(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here, and say why."""
    own = [item for item in items if HERE in item.path.parents]
    places = iter(sorted(own, key=lambda item: ORDER.index(item.path.stem)))
    items[:] = [next(places) if HERE in item.path.parents else item for item in items]
    if accelerator_type() is None:
        for item in own:
            item.add_marker(pytest.mark.skip(reason="there is no GPU here"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if HERE in item.path.parents and _seconds_left(item.config) <= 0:
        pytest.skip("no time is left")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _write(f"{report.outcome} {report.nodeid} {report.duration:.1f} s")
        if report.failed:
            _write(report.longreprtext)


def _seconds_left(config: pytest.Config) -> float:
    limit: float = config.getoption("--seconds", float("inf"))
    return limit - (time.monotonic() - STARTED)


def _write(text: str) -> None:
    for folder in _folders:
        with (folder / LINES).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


@pytest.fixture(scope="session")
def at_most(request: pytest.FixtureRequest) -> Callable[[float], float]:
    """Return a time limit: the given one, or the time that is left."""
    return lambda seconds: max(1.0, min(seconds, _seconds_left(request.config)))


@pytest.fixture(scope="session")
def figure() -> Callable[[str], None]:
    """Print a figure, and write it to the file."""

    def write(text: str) -> None:
        print(text)
        _write(text)

    return write


@pytest.fixture(scope="session")
def keep() -> Callable[[Path, str], None]:
    """Copy a file to the folder of the figures, under a name."""

    def copy(path: Path, name: str) -> None:
        for folder in _folders:
            (folder / name).write_bytes(path.read_bytes())

    return copy
