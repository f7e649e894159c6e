"""ms-swift: its genuine `save_mcore_checkpoint` and `load_mcore_checkpoint` (4.6.0 from PyPI)."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.offline.verification import verify
from tests.harness.jobs import RANK_SCRIPTS, assert_same_optimizer
from tests.harness.packages import installed_beside
from tests.harness.programs import Programs


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    packages, script = installed_beside("ms-swift", "4.6.0", "--only-binary=:all:"), RANK_SCRIPTS / "swift_loop.py"
    found = Programs(tmp_path_factory.mktemp("swift"))
    run: Path = found.place("run")
    found.add("saved", script, packages, 1, 4, "none", run)
    found.add("stock refuses", script, packages, 2, 2, run, "none", stock=True)
    found.add("loaded", script, packages, 2, 2, run, "none")
    found.run()
    return found


def test_it_resumes_under_another_layout(ran: Programs) -> None:
    (ended,) = ran.ended["stock refuses"]
    assert "(TP, PP) mismatch after resume ((2, 2) vs (1, 4) from checkpoint): not supported" in ended
    assert_same_optimizer(ran.dump("saved"), ran.dump("loaded"))


def test_its_arguments_are_not_taken_for_all_of_megatrons(ran: Programs) -> None:
    """They are under Megatron's names, but one that is missing says nothing of the version."""
    checkpoint = open_checkpoint(ran.place("run"))
    assert not checkpoint.arguments.tells_all
    assert str(checkpoint.layout) == "TP1 x PP4 x DP1"
    assert verify(checkpoint.folder).sound
