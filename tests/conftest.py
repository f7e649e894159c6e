"""What tests of several folders are given: the real checkpoints in turn, and the small Hugging Face models."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.harness.checkpoints import CORRUPTED, FLAT, INTACT, Fixture, fixture_named
from tests.harness.made_once import made_once

# The clock says how busy the machine is, not whether an example is right.
settings.register_profile("without a clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without a clock")


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: looking for garbage in it costs a twelfth of the tests' time."""
    gc.freeze()


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
