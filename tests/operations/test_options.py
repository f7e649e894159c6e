"""Tests the options of operations: the same by an object and by name, on the command line and in the result."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.cli import convert, diff, plan, verify
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.cli.options import options_of
from mcore_ckpt_ext.operations.options import (
    ComparisonOptions,
    ConversionOptions,
    Options,
    PlanOptions,
    VerificationOptions,
)
from tests.harness.checkpoints import fixture_named


def test_an_object_and_single_names_are_the_same() -> None:
    run = fixture_named("p01").run
    by_object = mcore_ckpt_ext.verify(run, VerificationOptions(quick=True))
    by_name = mcore_ckpt_ext.verify(run, quick=True)
    both = mcore_ckpt_ext.verify(run, VerificationOptions(workers=2), quick=True)
    assert by_object == by_name
    assert both.options == VerificationOptions(workers=2, quick=True)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(TypeError, match="forse"):
        mcore_ckpt_ext.convert(fixture_named("p01").run, "out", "legacy", forse=True)


# Options that no flag sets directly: the command derives them from others.
DERIVED = {
    ComparisonOptions: {"facts", "pictures"},
    ConversionOptions: {"facts"},
    PlanOptions: {"arguments", "facts", "most", "pins", "recomputation"},
    VerificationOptions: {"facts"},
}


@pytest.mark.parametrize(
    ("kind", "command"),
    [(ComparisonOptions, diff), (ConversionOptions, convert), (PlanOptions, plan), (VerificationOptions, verify)],
    ids=["diff", "convert", "plan", "verify"],
)
def test_each_option_is_one_of_the_command_with_the_same_default(kind: type[Options], command: object) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)  # type: ignore[attr-defined]
    defaults = {action.dest: action.default for action in parser._actions}
    names = {field.name for field in dataclasses.fields(kind)}
    assert names - defaults.keys() == DERIVED[kind] - defaults.keys()
    parsed = argparse.Namespace(**defaults, kind_of_facts=mcore_ckpt_ext.Facts)
    for name, value in vars(options_of(kind, parsed)).items():
        if name not in DERIVED[kind]:
            assert value == getattr(kind(), name) or (not value and not getattr(kind(), name))


def test_results_repeat_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(fixture_named("p01").run)
    assert main(["convert", run, str(tmp_path / "out"), "--to", "canonical", "--drop", "optimizer", "--json"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    assert options["drop"] == ["optimizer"]
    assert options.keys() == {field.name for field in dataclasses.fields(ConversionOptions)}
    assert main(["plan", run, "--gpus", "4", "--pin", "tp=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["pins"] == {"tp": 2}
