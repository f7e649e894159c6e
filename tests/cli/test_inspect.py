"""Test lines that `mcore-ckpt inspect` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext import Canonical, FsdpDtensor, Legacy, convert
from mcore_ckpt_ext.cli.inspect import _writer
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.formats.target import Target
from tests.harness.checkpoints import fixture_named


def test_the_writer_is_named_with_its_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(fixture_named("p10").run)]) == 0
    (written,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:2] == ["written", "by"])
    assert written.split()[2:4] == ["Megatron", "0.19"]
    assert (_writer("0.19.0"), _writer("not known")) == ("Megatron 0.19.0", "not known")


@pytest.mark.parametrize(
    ("target", "is_of_source"),
    [(Canonical(), True), (Legacy(), False), (FsdpDtensor(), False)],
    ids=["canonical", "legacy", "fsdp_dtensor"],
)
def test_whose_layout_a_converted_checkpoint_has(
    target: Target, is_of_source: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(fixture_named("p01").run, tmp_path / "out", target)
    assert main(["inspect", str(tmp_path / "out")]) == 0
    (layout,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["layout"])
    assert ("of the job that saved the source" in layout) == is_of_source
