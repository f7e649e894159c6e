"""Fixtures for tests of several folders: the real checkpoints, and the small Hugging Face models."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from mcore_ckpt_ext.patching import log
from mcore_ckpt_ext.patching.singletons import Process
from mcore_ckpt_ext.versions import parse_version
from tests.harness.checkpoints import CORRUPTED, FLAT, INTACT, Fixture, fixture_named
from tests.harness.made_once import made_once
from tests.harness.thorough import mark_rows

REPOSITORY = Path(__file__).parents[1]

# The clock says how busy the machine is, not whether an example is right.
settings.register_profile("without a clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without a clock")
# pytest-xdist gives its processes the width of its own terminal; what is printed into a test has no width.
os.environ.pop("COLUMNS", None)
# Nothing is compiled here, as in the jobs: merely decorating Megatron's functions would import the compiler, in each
# process of pytest and in each that a test starts.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
# Until everything is imported and collected, next to nothing is garbage.
_THRESHOLDS = gc.get_threshold()
gc.set_threshold(50_000)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `--quick` leaves out."""
    mark_rows(items)


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: looking for garbage in it costs a twelfth of the tests' time."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    return (yield from _skipped_where_not_installable())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    return (yield from _skipped_where_not_installable())


def _skipped_where_not_installable() -> Iterator[None]:
    """Skip a test in a cell of the test matrix that lacks what the test needs.

    There is no Megatron with Python 3.10 and 3.11, and none with torch 2.6 (`scripts/matrix_cell.py`).
    transformers does not use torch before 2.6, and says so in words of each release (`is_torch_available` and
    `PYTORCH_IMPORT_ERROR`, transformers/utils/import_utils.py, 5.20.2 and 5.23.0).
    """
    try:
        return (yield)
    except ImportError as error:
        release = parse_version(torch.__version__) or ()
        has_megatron = sys.version_info >= (3, 12) and release >= (2, 7)
        if not has_megatron and str(error.name).partition(".")[0] == "megatron":
            pytest.skip("needs Megatron, which needs Python 3.12 and torch 2.7 or later")
        if "PyTorch" in str(error) and release < (2, 6):
            pytest.skip("needs transformers 5, which needs torch 2.6 or later")
        raise


@pytest.fixture(params=INTACT)
def checkpoint_fixture(request: pytest.FixtureRequest) -> Fixture:
    """Each of the intact real checkpoints in turn."""
    return fixture_named(request.param)


@pytest.fixture(params=FLAT)
def flat_fixture(request: pytest.FixtureRequest) -> Fixture:
    """Each of the real checkpoints whose optimizer state lies in flat buffers."""
    return fixture_named(request.param)


@pytest.fixture(params=CORRUPTED)
def corrupted_fixture(request: pytest.FixtureRequest) -> Fixture:
    """Each of the checkpoints that Megatron wrote corrupted."""
    return fixture_named(request.param)


@pytest.fixture
def damaged(tmp_path: Path) -> Fixture:
    """A private copy of p01 (TP1 x PP4 x DP2, tied embeddings) to damage."""
    return fixture_named("p01").copy_to(tmp_path / "p01")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of every Hugging Face model, in fp32, by name."""
    from tests.harness import huggingface  # transformers takes seconds to import

    folder = made_once(tmp_path_factory, "models", huggingface.make_all)
    return {name: folder / name for name in huggingface.CONFIGS}


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with this package's metadata, made by its own build backend."""
    folder = tmp_path_factory.mktemp("site")
    code = "import sys, setuptools.build_meta as build; build.prepare_metadata_for_build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=REPOSITORY, check=True, capture_output=True)
    return folder


@pytest.fixture
def python(installation: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a fresh interpreter in which this package is installed; return the finished process."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        paths = [str(installation), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        clean = {k: v for k, v in os.environ.items() if k not in {"MCORE_CKPT_EXT", "RANK"}}
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=installation,  # the repository itself may hold metadata of an older build
            env={**clean, "PYTHONPATH": os.pathsep.join(paths), **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture
def fresh_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The package's logger as a fresh process has it, without what tests before have logged.

    Once a line is logged, the logger does not propagate, and pytest attaches handlers of its own to such a logger:
    then the package's handler leaves stderr to them.
    """
    logger = logging.getLogger(log.NAME)
    before = (logger.handlers[:], logger.level, logger.propagate)
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    monkeypatch.setattr(log, "PROCESS", Process())
    monkeypatch.delenv("RANK", raising=False)
    yield logger
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
