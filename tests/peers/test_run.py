"""Run one file of each framework's own tests, without and with the package; `run.py` runs all of them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.checkouts import VARIABLE as MEGATRON_VARIABLE
from tests.harness.checkouts import with_checkout
from tests.peers.results import PASSED, Comparison
from tests.peers.run import Campaign
from tests.peers.suites import COLOSSALAI, MEGATRON

COLOSSALAI_VARIABLE = "COLOSSALAI_PATH"
GEMINI = "tests/test_zero/test_gemini/test_zeroddp_state_dict.py"


def with_gemini() -> Path | None:
    """The checkout of ColossalAI that has these tests, in an environment that has what it needs."""
    checkouts = [Path(name) for name in os.environ.get(COLOSSALAI_VARIABLE, "").split(":") if name]
    found = [checkout for checkout in checkouts if (checkout / GEMINI).is_file()]
    return found[0] if found and find_spec("colossalai") else None


def assert_equal_and_run(found: Comparison) -> None:
    assert found.unexpected == [], found.table()
    assert PASSED in {outcome.state for outcome in found.without.values()}, found.table()


@with_checkout
def test_megatron_tests_pass_as_without_the_package() -> None:
    file = "tests/unit_tests/dist_checkpointing/test_global_metadata_reuse.py"
    assert_equal_and_run(Campaign(MEGATRON, Path(os.environ[MEGATRON_VARIABLE])).compare([file]))


@pytest.mark.skipif(
    with_gemini() is None,
    reason=f"runs ColossalAI's own {GEMINI} in a checkout of v0.5.0: {COLOSSALAI_VARIABLE}=FOLDER "
    "python3 scripts/run_tests.py tests/colossalai tests/peers",
)
def test_colossalai_tests_pass_as_without_the_package() -> None:
    checkout = with_gemini()
    assert checkout is not None
    assert_equal_and_run(Campaign(COLOSSALAI, checkout).compare([GEMINI]))
