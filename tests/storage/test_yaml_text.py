"""Test untrusted YAML: plain values or a refusal, at a cost proportional to its size."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.storage.budget import OverBudgetError
from mcore_ckpt_ext.storage.yaml_text import MOST_BYTES, dump_yaml, parse_yaml
from tests.harness.checkpoints import fixture_named


def a_bomb() -> str:
    """Twelve lines that stand for ten billion values."""
    repeated = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 11)]
    return "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x, x]", *repeated])


HOSTILE = {
    "names a class": "a: !!python/object/apply:os.system [exit 3]",
    "names a class, 'tag:yaml.org,2002:python/name": "!!python/name:os.system x",
    "names a class, '!mine": "a: !mine 1",
    "names a class, 'tag:yaml.org,2002:omap": "a: !!omap {b: 1}",
    "nested too deeply": "[" * 1_000_000,
    "nested too deeply;": "{a: " * 100_000,
    "nested too deeply:": "- " * 400_000,
    "is not defined": "a: &b [*c]",
    "which is not defined": "a: &a [*a]",
    "two entries 'a'": "a: 1\na: 2",
    "two entries '<<'": "b: &b {a: 1}\nc: {<<: *b}",
    "several documents": "a: 1\n---\nb: 1",
    "too many digits": f"a: {'9' * 100_000}",
    "not a plain value": "? [a]\n: b",
    "not allowed": "a: b: c",
    "control characters": "a: \x00",
    "more than": "a" * (MOST_BYTES + 1),
}


@pytest.mark.parametrize("reason", HOSTILE)
def test_unsupported_yaml_is_refused(reason: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ValueError, match=reason.rstrip(";:")):
        parse_yaml(HOSTILE[reason], "run_config.yaml")
    assert time.monotonic() - begun < 2


def test_repeated_anchors_count_once_for_each_use() -> None:
    with pytest.raises(OverBudgetError, match=r"run_config\.yaml"):
        parse_yaml(a_bomb(), "run_config.yaml")
    assert parse_yaml("a: &a [1, 2]\nb: *a", "x") == {"a": [1, 2], "b": [1, 2]}


def test_a_real_file_is_parsed_as_by_pyyaml() -> None:
    text = (fixture_named("p49").iteration / "run_config.yaml").read_text()
    found = parse_yaml(text, "run_config.yaml")
    assert found == yaml.safe_load(text)
    assert parse_yaml(dump_yaml(found), "again") == found


@pytest.mark.parametrize(
    "text", ["a: 1e-06", "a: 1.0e-06", "a: .inf", "a: 0x1F", "a: ~", "a: yes", "a: 'yes'", "", "3"]
)
def test_values_are_those_of_yaml(text: str) -> None:
    assert parse_yaml(text, "x") == yaml.safe_load(text)


def test_a_set_is_its_members() -> None:
    assert parse_yaml("a: !!set {b, c}\nd: !!set {}", "x") == {"a": {"b": None, "c": None}, "d": {}}


def test_dates_and_binary_data_stay_texts() -> None:
    assert parse_yaml("a: 2026-01-01\nb: !!binary aGk=", "x") == {"a": "2026-01-01", "b": "aGk="}


def test_without_pyyaml_the_message_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(UnsupportedCheckpointError, match="pip install pyyaml"):
        parse_yaml("a: 1", str(Path("run") / "run_config.yaml"))
