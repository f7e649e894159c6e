"""What messages advise exists: flags of Megatron or of this package, variables, and command lines of `mcore-ckpt`."""

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

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import COMMANDS, parser_of
from mcore_ckpt_ext.settings import SETTINGS

PACKAGE = Path(mcore_ckpt_ext.__file__).parent
FLAG, VARIABLE = re.compile(r"(?<![\w-])--[a-z][\w-]*\w"), re.compile(r"\bMCORE_CKPT_EXT(?:_[A-Z]+)*\b")
COMMAND = re.compile(r"mcore-ckpt ((?:{})\b[^`;,(]*)".format("|".join(COMMANDS)))
# Flags that the newest release does not have, and the releases that a message speaks of.
OF_OTHER_RELEASES = {"--ckpt-drop-redundant-extra-state": "the development head of August 2026"}
PARSER = "import argparse; from megatron.training.arguments import add_megatron_arguments as add; " + (
    "print(*add(argparse.ArgumentParser(allow_abbrev=False))._option_string_actions)"
)


@cache
def texts() -> list[tuple[str, str]]:
    """All texts of the package."""
    return list(found_texts())


def found_texts() -> Iterator[tuple[str, str]]:
    """Every text of the package that is no docstring, with its place; f-strings with a space for what is filled in."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                yield where, "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | statements:
                yield where, node.value


def options(command: str) -> dict[str, argparse.Action]:
    """The options of a command, by every spelling."""
    commands = (action for action in parser_of([command])._actions if isinstance(action, argparse._SubParsersAction))
    return dict(next(commands).choices[command]._option_string_actions)


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Flags of the installed Megatron, of this package's jobs, and of the command line."""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", PARSER], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    megatron = set(run.stdout.splitlines()[-1].split())
    assert len(megatron) > 500
    own = {setting.flag for setting in SETTINGS if setting.argument}
    of_all_commands = {"--version", "--help", "--print-completion"}
    return megatron | own | of_all_commands | {spelling for command in COMMANDS for spelling in options(command)}


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


@pytest.mark.parametrize("command", COMMANDS)
def test_command_lines_have_options_of_their_command(command: str) -> None:
    of_command = options(command)
    for where, text in texts():
        for line in COMMAND.findall(text):
            words = shlex.split(line.replace("'", ""))
            if words[0] != command:
                continue
            for flag, value in zip(words, [*words[1:], ""], strict=True):
                if flag.startswith("--"):
                    assert flag in of_command, f"{where}: {line}"
                    choices = of_command[flag].choices
                    assert choices is None or value in choices, f"{where}: {line}"
