"""Test that hints of messages exist: flags of Megatron or this package, variables, and command lines."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import COMMANDS, main, parser_of
from mcore_ckpt_ext.settings import SETTINGS
from mcore_ckpt_ext.targets import TARGETS
from tests.harness.checkpoints import fixture_named

PACKAGE = Path(mcore_ckpt_ext.__file__).parent
REPOSITORY = PACKAGE.parent
FLAG, VARIABLE = re.compile(r"(?<![\w-])--[a-z][\w-]*\w"), re.compile(r"\bMCORE_CKPT_EXT(?:_[A-Z]+)*\b")
COMMAND = re.compile(r"mcore-ckpt ((?:{}) [^`;,()]+)".format("|".join(COMMANDS)))
TARGET, PAGE = re.compile(r"--to (?!is missing)([a-z]\w*)"), re.compile(r"\bdocs/[\w/-]+\.md")
EXTRA = re.compile(r"mcore_ckpt_ext\[(\w+)\]")
# The words of a command that a reader replaces by the path of a checkpoint.
SOURCES = {"PATH", "SRC", "A", "B"}
# Flags that the newest release's own loop does not have, and where the message speaks of them.
OF_OTHER_RELEASES = {
    "--ckpt-drop-redundant-extra-state": "the development head of August 2026",
    "--dataloader-save": "scripts that read by Energon, as examples/multimodal of Megatron-LM",
}
PARSER = "import argparse; from megatron.training.arguments import add_megatron_arguments as add; " + (
    "print(*add(argparse.ArgumentParser(allow_abbrev=False))._option_string_actions)"
)


@cache
def texts(containing: str = "") -> list[tuple[str, str]]:
    """All texts of the modules in whose source this stands, with their places."""
    return [found for path in sorted(PACKAGE.rglob("*.py")) for found in texts_of(path, containing)]


def texts_of(path: Path, containing: str) -> Iterator[tuple[str, str]]:
    """Every text of a module that is no docstring, with its place; f-strings with "…" for what is filled in."""
    if containing not in (source := path.read_text(encoding="utf-8")):
        return
    nodes, module = [*ast.walk(ast.parse(source))], path.relative_to(PACKAGE)
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    inside |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        else:
            continue
        yield f"{module}:{node.lineno}", text


def options(command: str) -> dict[str, argparse.Action]:
    """The options of a command, by every spelling."""
    commands = (action for action in parser_of([command])._actions if isinstance(action, argparse._SubParsersAction))
    return dict(next(commands).choices[command]._option_string_actions)


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Flags of the installed Megatron, of this package's jobs, of torchrun, and of the command line."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", PARSER], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    megatron = set(run.stdout.splitlines()[-1].split())
    assert len(megatron) > 500
    own = {setting.flag for setting in SETTINGS if setting.argument}
    of_torchrun = get_args_parser()._option_string_actions.keys()
    of_all_commands = {"--version", "--help", "--print-completion"}
    of_one = {spelling for command in COMMANDS for spelling in options(command)}
    return megatron | own | of_torchrun | of_all_commands | of_one


def test_every_flag_exists(known: set[str]) -> None:
    named = {(flag, where) for where, text in texts() for flag in FLAG.findall(text)}
    assert len(named) > 100
    unknown = [f"{flag} in {where}" for flag, where in sorted(named) if flag not in known | OF_OTHER_RELEASES.keys()]
    assert "; ".join(unknown) == ""


def test_flags_of_other_releases_are_named_and_unknown_to_this_one(known: set[str]) -> None:
    named = {flag for _, text in texts() for flag in FLAG.findall(text)}
    assert OF_OTHER_RELEASES.keys() <= named - known


def test_every_variable_exists() -> None:
    found = {name for _, text in texts() for name in VARIABLE.findall(text)}
    assert found - {setting.name for setting in SETTINGS} == set()


def command_lines() -> list[str]:
    """The command lines of all messages, each once, without those that are made of what a user typed."""
    program = COMMAND.pattern.partition(" ")[0]  # few modules name it: every process that collects tests comes here
    found = {line.strip().removesuffix(".") for _, text in texts(program) for line in COMMAND.findall(text)}
    return sorted(line for line in found if not line.startswith("convert …"))


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a checkpoint for PATH, SRC, A and B, and a new folder for DST; one that names a MODEL is parsed only."""
    monkeypatch.chdir(tmp_path)
    places = dict.fromkeys(SOURCES, str(fixture_named("p02").run)) | {"DST": "out"}
    words = [places.get(word.strip("…"), word) for word in shlex.split(line)]
    if "MODEL" in words:
        parser_of(words).parse_args(words)
        return
    try:
        code = main(words)
    except SystemExit as stopped:  # of argparse, where an option prints something and ends
        code = int(stopped.code or 0)
    assert code == 0, capsys.readouterr().err


def test_command_lines_are_found() -> None:
    assert {"convert SRC DST --to torch_dist", "verify PATH --record FILE", "inspect PATH"} <= {*command_lines()}


def test_targets_pages_and_extras_in_hints_exist() -> None:
    """Targets of `--to`, pages of the documentation, and extras of this package."""
    extras = re.findall(r"^(\w+) = \[", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    everything = " ".join(text for _, text in texts())
    assert {*TARGET.findall(everything)} <= {*TARGETS}
    assert {*EXTRA.findall(everything)} <= {*extras}
    pages = {*PAGE.findall(everything)}
    assert pages
    assert [page for page in pages if not (REPOSITORY / page).is_file()] == []
