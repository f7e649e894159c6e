"""Test a model whose parameter order no rule describes, saved without a sidecar: its content reveals it.

The job that resumes it registers its parameters in Megatron's own order, so that the live model is no evidence.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from tests.harness.checkpoints import everything_in
from tests.harness.jobs import OFF, RANK_SCRIPTS, SAVED, differing, resume, train_and_save
from tests.harness.layouts import Layout
from tests.harness.models import GATED
from tests.harness.rehearsals import rehearsal_of_resume

pytestmark = pytest.mark.nightly

DISCOVERED = "discovery by content"


@pytest.mark.parametrize("model", [[], GATED], ids=["gpt", "gated"])
def test_an_unknown_order_is_discovered_and_verified(model: list[str], tmp_path: Path) -> None:
    plugins = [RANK_SCRIPTS / "another_order.py"]
    saved = train_and_save(
        tmp_path / "saved", Layout(1, 2, 4), until=SAVED + 1, more=model, plugins=plugins, environment=OFF
    )
    truth = assemble(saved.at_save)
    checkpoint = open_checkpoint(saved.run)
    checkpoint.names("fp32_param")
    assert checkpoint.optimizer.state().order_sources() == [DISCOVERED]
    assert differing(truth, everything_in(checkpoint)) == []
    for number, layout in enumerate([Layout(2, 2, 4), Layout(1, 1, 2)]):
        resumed = resume(tmp_path / str(number), layout, saved.run, more=model)
        assert resumed.summary["witnesses"] == DISCOVERED
        assert differing(truth, assemble(resumed.at_load)) == []
        assert rehearsal_of_resume(saved.run, layout).will_succeed
        assert resumed.losses[SAVED + 1] == pytest.approx(saved.losses[SAVED + 1], rel=1e-4)
