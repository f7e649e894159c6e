"""Test arguments that a user passes as JSON, Python words or text, by one rule for every command."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext import HuggingFace
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.job.assignments import parse_assignments
from tests.harness.checkpoints import fixture_named


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("swiglu=True", True),
        ("swiglu=true", True),
        ("num_query_groups=None", None),
        ("num_layers=32", 32),
        ("rotary_base=1e6", 1e6),
        ("normalization=RMSNorm", "RMSNorm"),
        ('hybrid_layer_pattern="M*"', "M*"),
        ("spec=", ""),
        ("moe_layer_freq=([1]*3)", [1, 1, 1]),
        ("moe_layer_freq=([0]*1+[1]*2)*2", [0, 1, 1, 0, 1, 1]),
        ("moe_layer_freq=[1]*9999999", "[1]*9999999"),
        ("moe_layer_freq=[1]*(2-1)", "[1]*(2-1)"),
        (f"spec={'[' * 100_000}", "[" * 100_000),
    ],
)
def test_values(text: str, value: object) -> None:
    (found,) = parse_assignments([text]).values()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("texts", [["swiglu"], ["=1"], ["a b=1"], ["swiglu=1", "swiglu=2"]])
def test_bad_input(texts: list[str]) -> None:
    with pytest.raises(UsageError):
        parse_assignments(texts)
    with pytest.raises(UsageError):
        HuggingFace(arguments=texts)


def test_plan_takes_python_words(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan --argument` once took `True` for a text."""
    run = str(fixture_named("p01").run)
    assert main(["plan", run, "--gpus", "8", "--argument", "sequence_parallel=True"]) == 0
    assert main(["plan", run, "--gpus", "8", "--argument", "num_layers=1", "num_layers=2"]) == 2
    assert "given twice" in capsys.readouterr().err
    for rehearsed in ([], ["--rehearse", "tp=1"]):
        assert main(["plan", run, "--gpus", "8", *rehearsed, "--argument", "seq_lenght=64"]) == 2
        err = capsys.readouterr().err
        assert "Megatron has no such argument; found: seq_lenght;" in err
        assert "did you mean seq_length?" in err
