"""Test that the drawings are current: made again from the checkpoints, they are equal byte for byte."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from documentation import drawings  # type: ignore[attr-defined]

from tests.harness.checkpoints import fixture_named

PICTURES = Path(drawings.PICTURES)


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return drawings.pictures(lambda number: fixture_named(number).run)


def test_made_again_they_are_the_same(drawn: dict[str, str]) -> None:
    assert {path.name for path in PICTURES.glob("*.svg")} == drawn.keys()
    old = [name for name, text in drawn.items() if (PICTURES / name).read_text() != text]
    assert not old, "run scripts/documentation/drawings.py"


def test_each_is_a_picture_of_itself_alone(drawn: dict[str, str]) -> None:
    for name, text in drawn.items():
        tree = ElementTree.fromstring(text)
        assert tree.tag.endswith("svg")
        assert not {"href", "src"} & {key for part in tree.iter() for key in part.attrib}, name


def test_the_names_of_a_checkpoint_are_text() -> None:
    picture = drawings.Drawing('<script>"')
    picture.text(0, 0, "<script>&")
    assert "<script" not in str(picture)
