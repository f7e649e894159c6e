"""Test lines that `mcore-ckpt inspect` prints."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.cli.inspect import _writer
from mcore_ckpt_ext.cli.main import main
from tests.harness.checkpoints import fixture_named


def test_the_writer_is_named_with_its_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(fixture_named("p10").run)]) == 0
    (written,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:2] == ["written", "by"])
    assert written.split()[2:4] == ["Megatron", "0.19"]
    assert (_writer("0.19.0"), _writer("not known")) == ("Megatron 0.19.0", "not known")
