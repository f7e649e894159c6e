"""Mamba, attention and MLP layers in one model of genuine Megatron-LM 0.19.2, resumed under other layouts.

Its kernels run on GPUs only (see `ranks/hybrid_layers.py`): the optimizer holds noise instead of what a training left,
and what is compared is the live optimizer before saving and after loading, element for element.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.layout.sidecar import FILE_NAME
from tests.harness.cases import Case, load_all, save_noise
from tests.harness.jobs import copy_of, differing
from tests.harness.layouts import Layout

MIXER = ["--mamba-state-dim", "8", "--mamba-head-dim", "8", "--mamba-num-groups", "2", "--mamba-num-heads", "8"]
PLAIN = ["--position-embedding-type", "none", "--normalization", "RMSNorm", "--disable-bias-linear"]
PLAIN += ["--untie-embeddings-and-output-weights", "--spec", "hybrid_layers", "hybrid_stack"]


def pattern(layers: str) -> list[str]:
    return [*MIXER, *PLAIN, "--hybrid-layer-pattern", layers]


@pytest.mark.parametrize(
    ("source", "written", "target", "running"),
    [
        (Layout(2, 2, 4), "M*M-|M*", Layout(1, 1, 2), "M*M-M*"),
        (Layout(1, 1, 1), "M*M-M*", Layout(2, 2, 4), "M*|M-M*"),
    ],
    ids=["TP2 x PP2 to TP1 x PP1", "TP1 x PP1 to TP2 x PP2"],
)
def test_the_live_optimizer_equals_the_one_that_was_saved(
    source: Layout, written: str, target: Layout, running: str, tmp_path: Path
) -> None:
    run = save_noise(tmp_path / "saved", source, pattern(written))
    bare = copy_of(run, tmp_path / "bare")
    (bare / "iter_0000004" / FILE_NAME).unlink()
    cases = [Case("sidecar", run, dump=tmp_path / "sidecar"), Case("bare", bare, dump=tmp_path / "bare_dump")]
    outcomes = load_all(tmp_path / "job", target, cases, more=pattern(running))
    truth = assemble(tmp_path / "saved" / "dump" / "after_save_0000004")
    for name, witness in (("sidecar", "the sidecar"), ("bare", "the live model")):
        assert [rank["error"] for rank in outcomes[name]] == [None] * target.ranks
        assert f"placed by {witness})" in outcomes[name][0]["lines"][0]
    assert differing(truth, assemble(tmp_path / "sidecar")) == []
    assert differing(truth, assemble(tmp_path / "bare_dump")) == []
    whole = open_checkpoint(bare)
    for kind in whole.kinds():
        assert all(whole.tensor(kind, name).read().numel() for name in whole.names(kind))
