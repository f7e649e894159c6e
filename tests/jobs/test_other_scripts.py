"""Test the unchanged `pretrain_bert.py` and `pretrain_t5.py`, which Megatron-LM has up to 0.16."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext import Legacy, TorchDist
from mcore_ckpt_ext.layout.sidecar import FILE_NAME
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.verification import verify
from tests.harness.checkouts import VARIABLE, only_for
from tests.harness.jobs import RANK_SCRIPTS, assert_same_optimizer, resume, train_and_save
from tests.harness.layouts import Layout

# How it is saved, how it is resumed (T5 has one stage there), arguments of the model.
SCRIPTS: dict[str, tuple[Layout, Layout, list[str]]] = {
    "bert": (Layout(1, 4, 4), Layout(2, 2, 4), ["--spec", "local", "--attention-backend", "local"]),
    "t5": (Layout(2, 1, 4), Layout(4, 1, 4), ["--decoder-seq-length", "32", "--vocab-extra-ids", "10"]),
}


@only_for("0.16")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_model_is_resumed_under_another_layout(name: str, tmp_path: Path) -> None:
    """With a sidecar and without one; and converted, all is the same."""
    checkout = Path(os.environ[VARIABLE])
    written, running, more = SCRIPTS[name]
    how: dict[str, Any] = {
        "script": checkout / f"pretrain_{name}.py", "megatron": checkout, "more": more,
        "plugins": [RANK_SCRIPTS / "masked_data.py"],
    }  # fmt: skip
    saved = train_and_save(tmp_path / "saved", written, **how)
    resumed = resume(tmp_path / "with a sidecar", running, saved.run, **how)
    assert resumed.summary["witnesses"] == "the sidecar"
    assert_same_optimizer(saved.at_save, resumed.at_load)
    (saved.iteration / FILE_NAME).unlink()
    resumed = resume(tmp_path / "without one", running, saved.run, **how)
    assert resumed.summary["witnesses"] == "the live model"
    assert_same_optimizer(saved.at_save, resumed.at_load)
    for target in (Legacy(), TorchDist()):
        convert(saved.run, tmp_path / target.name, target)
        assert verify(tmp_path / target.name).sound
        assert compare(saved.run, tmp_path / target.name).equal
