"""Test options that take assignments: one syntax for every command, wherever the paths stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_ckpt_ext.cli.assignments import repeat_options
from mcore_ckpt_ext.cli.main import main
from tests.harness.checkpoints import fixture_named

SEVERAL = ("--argument", "seq_length=64", "rotary_base=500000")
REPEATED = ("--argument", "seq_length=64", "--argument", "rotary_base=500000")
NOTE = "rotary_base is 500000, as passed"


@pytest.mark.parametrize("options", [SEVERAL, REPEATED], ids=["several", "repeated"])
@pytest.mark.parametrize("options_first", [False, True])
def test_convert_and_plan_take_arguments_alike(
    options: tuple[str, ...], options_first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths after the assignments are paths."""
    run = str(fixture_named("p02").run)
    commands = {"plan": ([run], ["--gpus", "4"]), "convert": ([run, str(tmp_path / "hf")], ["--to", "hf"])}
    for command, (paths, required) in commands.items():
        words = [*options, *paths] if options_first else [*paths, *options]
        assert main([command, *required, *words]) == 0
        shown = capsys.readouterr()
        assert NOTE in shown.out + shown.err


def test_pins_before_the_path(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--gpus", "4", "--json", "--pin", "tp=2", "pp=2", str(fixture_named("p01").run)]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["layout"] == "TP2 x PP2 x VPP2 x DP1"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--pin=tp=2 pp=3 run", "--pin=tp=2 --pin pp=3 run"),
        ("--argument a=1 ./b=2 c=3", "--argument a=1 ./b=2 c=3"),
        ("--change a=1 --all b=2", "--change a=1 --all b=2"),
        ("--drop a=1 b=2", "--drop a=1 b=2"),
        ("--argument a b=2", "--argument a b=2"),
    ],
)
def test_only_assignments_after_an_option_belong_to_it(words: str, expected: str) -> None:
    assert repeat_options(words.split()) == expected.split()
