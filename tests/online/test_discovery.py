"""A model whose order of parameters no rule knows, saved without a sidecar: discovery by content finds the layout.

It is resumed by a model that registers its parameters in Megatron's own order, so that the live model is no witness.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from tests.megatron import assemble, launch, losses, train
from tests.online.jobs import RANK_SCRIPTS, SUMMARY, differing
from tests.online.test_parallelism import offline
from tests.test_models_online import GATED

DISCOVERED = "discovery by content"


@pytest.mark.parametrize("model", [[], GATED], ids=["gpt", "gated"])
def test_an_unknown_order_is_discovered_and_proven(model: list[str], tmp_path: Path) -> None:
    saved = train(
        4, 1, 2, folder=tmp_path / "saved", more=model,
        plugins=[RANK_SCRIPTS / "another_order.py"], environment={"MCORE_CKPT_EXT": "0"},
    )  # fmt: skip
    assert saved.returncode == 0, saved.output[-6000:]
    run, truth = tmp_path / "saved" / "checkpoints", assemble(tmp_path / "saved" / "dump" / "after_save_0000004")
    checkpoint = open_checkpoint(run)
    checkpoint.names("fp32_param")
    assert checkpoint.optimizer.witnesses() == [DISCOVERED]
    assert differing(truth, offline(checkpoint)) == []
    for number, (ranks, tensor, pipeline) in enumerate([(4, 2, 2), (2, 1, 1)]):
        folder = tmp_path / str(number)
        resumed = launch(ranks, run, tensor, pipeline, folder=folder, more=model)
        assert resumed.returncode == 0, resumed.output[-6000:]
        (summary,) = [line for line in resumed.output.splitlines() if SUMMARY in line]
        assert f"layout by {DISCOVERED})" in summary
        assert differing(truth, assemble(folder / "dump" / "after_load")) == []
        assert losses(folder)[5] == pytest.approx(losses(tmp_path / "saved")[5], rel=1e-4)
