"""Test that the table of values of Megatron's parser is complete, for the installed Megatron and a checkout."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

from tests.harness.checkouts import EITHER, VARIABLE

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "formats.md"
# An option of the parser's own, or a field of the dataclasses that it is made of.
SPELLINGS = (r"'{option}',[^)]*?choices=\[(.*?)\]", r"\b{field}: Literal\[(.*?)\]")


def values_of(sources: Path, option: str) -> set[str]:
    """The choices of an option, by the source of the parser."""
    field = option.removeprefix("--").replace("-", "_")
    patterns = [re.compile(one.format(option=option, field=field), re.DOTALL) for one in SPELLINGS]
    texts = [path.read_text() for path in (*sources.glob("*.py"), *sources.glob("config/*.py"))]
    found = [match[1] for text in texts for pattern in patterns for match in pattern.finditer(text)]
    return {value for choices in found for value in re.findall(r"[\'\"](\w+)[\'\"]", choices)}


def values_told(option: str) -> set[str]:
    rows = re.findall(rf"^\| `{option}` \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    return {value for row in rows for value in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize("of_checkout", EITHER)
@pytest.mark.parametrize("option", ["--ckpt-format", "--optimizer"])
def test_every_value_is_documented(option: str, of_checkout: bool) -> None:
    if of_checkout:
        sources = Path(os.environ[VARIABLE]) / "megatron" / "training"
    else:
        spec = importlib.util.find_spec("megatron")
        if spec is None or not (places := list(spec.submodule_search_locations or ())):
            pytest.skip("Megatron is not installed")
        sources = Path(places[0]) / "training"
    known = values_of(sources, option)
    assert {"--ckpt-format": "torch_dist", "--optimizer": "adam"}[option] in known
    assert known <= values_told(option), f"tell of {option} {known - values_told(option)} in {PAGE.name}"
