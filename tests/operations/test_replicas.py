"""Test differing copies of one tensor on several ranks: every command reports them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.model_space.tensors import WEIGHT
from tests.harness.checkpoints import fixture_named

NORM = "decoder.final_layernorm.weight"


@pytest.fixture
def drifted(tmp_path: Path) -> Path:
    """Legacy files of two tensor ranks, the second of which has another norm at the model's end."""
    source = fixture_named("p02").run
    run = tmp_path / "drifted"
    mcore_ckpt_ext.convert(
        source, run, mcore_ckpt_ext.Legacy(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
    )
    (file,) = run.glob("iter_*/mp_rank_01/model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    content["model"][NORM][3] += 1
    torch.save(content, file)
    return run


def test_convert_takes_the_first_and_says_so(drifted: Path, tmp_path: Path) -> None:
    report = mcore_ckpt_ext.convert(drifted, tmp_path / "out", mcore_ckpt_ext.Canonical())
    (note,) = (note for note in report.notes if "replicas of a tensor" in note)
    assert f"{WEIGHT} {NORM}" in note and "mp_rank_00" in note and "mp_rank_01" in note
    intact = mcore_ckpt_ext.convert(fixture_named("p08").run, tmp_path / "other", mcore_ckpt_ext.Canonical())
    assert not any("copies" in note for note in intact.notes)


def test_diff_does_not_call_them_equal(drifted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = mcore_ckpt_ext.compare(fixture_named("p02").run, drifted)
    assert not found.equal and all(kind.equal for kind in found.kinds)
    assert (len(found.differing_copies_a), len(found.differing_copies_b)) == (0, 1)
    assert main(["diff", str(fixture_named("p02").run), str(drifted)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[-1].startswith("NOT KNOWN TO BE EQUAL: the first copies are equal")
    assert any(line.startswith("  in B: replicas of a tensor differ") for line in told)


def test_verify_calls_them_unsound(drifted: Path) -> None:
    found = mcore_ckpt_ext.verify(drifted)
    assert not found.sound
    assert any(f"{WEIGHT} {NORM}" in finding.where for finding in found.findings)
