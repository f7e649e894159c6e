"""Test that environment variables are defined once: the documentation's table is generated from the module."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.megatron.flags import _with_own_flags, check_settings
from mcore_ckpt_ext.settings import (
    CONTINUE,
    EXPORT_HF,
    FALLBACK,
    NEW_TOKENS,
    ON_SAVE_FAILURE,
    SETTINGS,
    STOP,
    SWITCH,
    VERIFY_ALL,
    WRITER_PATIENCE,
    Setting,
)

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("setting", "text", "value", "is_valid"),
    [
        (SWITCH, "0", False, True),
        *((SWITCH, text, False, True) for text in ("false", "False", "no", "NO", "off", "Off", " 0 ")),
        *((SWITCH, text, True, True) for text in ("1", "true", "Yes", "on")),
        (SWITCH, "flase", True, False),
        (SWITCH, "2", True, False),
        (SWITCH, "", True, True),
        (VERIFY_ALL, "Full", True, True),
        (VERIFY_ALL, "off", False, True),
        (VERIFY_ALL, "1", False, False),
        (NEW_TOKENS, "no", False, True),
        (FALLBACK, "TRUE", True, True),
        (ON_SAVE_FAILURE, "continue", CONTINUE, True),
        (ON_SAVE_FAILURE, "Continue", CONTINUE, True),
        (ON_SAVE_FAILURE, "off", STOP, False),
        (WRITER_PATIENCE, "15", 15.0, True),
        (WRITER_PATIENCE, "long", 300.0, False),
        (WRITER_PATIENCE, "nan", 300.0, False),
        (WRITER_PATIENCE, "inf", 300.0, False),
        (WRITER_PATIENCE, "-1", 300.0, False),
        (EXPORT_HF, "-1", 0, False),
    ],
)
def test_invalid_values_count_as_not_set(
    setting: Setting[Any], text: str, value: object, is_valid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting.name, text)
    assert (setting.value, setting.is_valid) == (value, is_valid)


def test_invalid_values_end_a_megatron_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked for checksums, or for training to go on, must not get the opposite."""
    check_settings()
    monkeypatch.setenv("MCORE_CKPT_EXT_VERIFY", "1")
    monkeypatch.setenv("MCORE_CKPT_EXT_ON_SAVE_FAILURE", "Contineu")
    with pytest.raises(UsageError, match="VERIFY=1; MCORE_CKPT_EXT_ON_SAVE_FAILURE=Contineu; expected: .*full: "):
        check_settings()


SWITCHES = [setting for setting in SETTINGS if setting.default in (False, True)]  # 0 among them, which is off


@pytest.mark.parametrize("setting", SWITCHES, ids=lambda setting: setting.name)
def test_every_switch_understands_the_words_for_off(setting: Setting[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "false", "FALSE", "No", "off"):
        monkeypatch.setenv(setting.name, text)
        assert (setting.value, setting.is_valid) == (False, True)


def test_importing_torch_reports_an_invalid_value() -> None:
    """In any program, because a job without Megatron's arguments would never hear of it."""
    program = "from mcore_ckpt_ext_autoload import register; register()"
    environment = os.environ | {"MCORE_CKPT_EXT": "flase", "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "MCORE_CKPT_EXT=flase: invalid value, ignored; valid: 0, false, no or off switches" in done.stderr


def test_an_argument_outweighs_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXPORT_HF.name, "1000")
    assert EXPORT_HF.choose(Namespace(ckpt_ext_export_hf=0)) == 0
    assert EXPORT_HF.choose(Namespace(ckpt_ext_export_hf=None)) == 1000
    monkeypatch.setenv(FALLBACK.name, "1")
    parsed = _with_own_flags(None)(ArgumentParser()).parse_args([])
    assert FALLBACK.choose(parsed)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_without_the_variable_the_default_holds(setting: Setting[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(setting.name, raising=False)
    assert (setting.text, setting.value, setting.is_valid) == (None, setting.default, True)


def test_the_documentation_explains_each() -> None:
    text = (REPOSITORY / "docs" / "reference" / "settings.md").read_text()
    rows = re.findall(r"^## (MCORE_CKPT_EXT\w*)", text, re.MULTILINE)
    assert "<!-- generated: settings -->" in text
    assert rows == [setting.name for setting in SETTINGS]


def strings_of_code(path: Path) -> Iterator[str]:
    """The strings of a module, without those that stand alone: its docstrings."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def test_no_other_module_spells_a_variable() -> None:
    named = {
        path.name
        for path in (REPOSITORY / "mcore_ckpt_ext").rglob("*.py")
        if any("MCORE_CKPT_EXT" in text for text in strings_of_code(path))
    }
    assert named == {"settings.py"}
