"""Test the map of differences in a tensor, by properties, against counting each element."""

from __future__ import annotations

import shutil
from math import prod
from pathlib import Path
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt_ext import compare, open_checkpoint
from mcore_ckpt_ext.operations.difference_map import MOST_COLUMNS, MOST_ROWS, MapBuilder
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import MATRIX, flip, payload_position


@given(st.lists(st.integers(1, 90), min_size=1, max_size=3), st.randoms(use_true_random=False), st.integers(1, 40))
def test_each_element_is_counted_in_its_cell(shape: list[int], random: Random, number: int) -> None:
    numel = prod(shape)
    positions = torch.tensor(sorted(random.sample(range(numel), min(number, numel))))
    distances = torch.tensor([random.choice([0.5, 2.0, float("inf"), float("nan")]) for _ in positions]).double()
    builder = MapBuilder(shape)
    half = len(positions) // 2
    builder.add(positions[:half], distances[:half])
    builder.add(positions[half:], distances[half:])
    found = builder.finish()
    height, width = (shape[0], numel // shape[0]) if len(shape) > 1 else (1, numel)
    assert (found.rows, found.columns) == (min(height, MOST_ROWS), min(width, MOST_COLUMNS))
    expected: dict[int, tuple[int, float]] = {}
    for position, distance in zip(positions.tolist(), distances.tolist(), strict=True):
        row, column = divmod(position, width)
        cell = row * found.rows // height * found.columns + column * found.columns // width
        count, largest = expected.get(cell, (0, 0.0))
        expected[cell] = (count + 1, max(largest, distance if distance < float("inf") else 0.0))
    assert {cell: (count, largest) for cell, count, largest in found.cells} == expected


def test_one_flipped_bit_is_one_cell(tmp_path: Path) -> None:
    fixture = fixture_named("p01")
    shutil.copytree(fixture.run, tmp_path / "run")
    path, position = payload_position(open_checkpoint(tmp_path / "run"), "weight", MATRIX, 700)
    flip(path, position)
    (kind,) = compare(fixture.run, tmp_path / "run", kinds=["weight"], pictures=True).kinds
    (tensor,) = kind.different
    assert tensor.where is not None
    ((_, count, largest),) = tensor.where.cells
    assert (count, largest) == (1, tensor.largest)
    (kind,) = compare(fixture.run, tmp_path / "run", kinds=["weight"]).kinds
    assert kind.different[0].where is None
