"""Test the table of dimensions."""

from __future__ import annotations

from dataclasses import fields

import pytest

from mcore_ckpt_ext.job.arguments.run import RunTable
from mcore_ckpt_ext.job.dimensions import DIMENSIONS, PINS, format_sizes, with_defaults
from mcore_ckpt_ext.layout.parallel import ParallelLayout


def test_every_row_has_its_attribute_and_its_argument() -> None:
    names = [field.name for field in fields(ParallelLayout) if field.name != "unknown"]
    assert [dimension.name for dimension in DIMENSIONS] == names
    assert all(hasattr(RunTable, dimension.argument) for dimension in DIMENSIONS)


def test_what_a_user_can_choose() -> None:
    assert list(PINS) == ["tp", "pp", "vpp", "ep", "etp", "cp"]
    expected = {"tensor": 4, "pipeline": 2, "virtual_pipeline": 1, "expert": 1, "expert_tensor": 4, "context": 1}
    assert with_defaults({"tensor": 4, "pipeline": 2}) == expected


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor": 2}, "TP2"),
        ({"tensor": 1, "pipeline": 2, "expert": 4}, "TP1 x PP2 x EP4"),
        ({"tensor": 2, "expert": 4, "expert_tensor": 2}, "TP2 x EP4"),
        ({"tensor": 2, "expert": 4, "expert_tensor": 1, "context": 2, "data": 8}, "TP2 x EP4 x ETP1 x CP2 x DP8"),
        ({"tensor": 2, "expert": 1, "expert_tensor": 1}, "TP2 x ETP1"),
        ({"world": 8}, ""),
        ({}, ""),
    ],
)
def test_sizes_in_words(sizes: dict[str, int], words: str) -> None:
    assert format_sizes(sizes) == words
