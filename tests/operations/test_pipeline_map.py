"""Test the map of layers to ranks against the live jobs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mcore_ckpt_ext import inspect
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout.rank_grid import RankGrid
from mcore_ckpt_ext.operations.pipeline_map import _ranks
from tests.harness.checkpoints import fixture_named

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


@pytest.mark.parametrize("name", ["p01", "p02", "p03", "p08", "p09", "p10"])
def test_every_layer_is_where_the_job_had_it(name: str) -> None:
    """The truth lists, for each rank, the parameters of its gradient buffers."""
    fixture = fixture_named(name)
    stages = inspect(fixture.run).stages
    layers_of: dict[int, set[int]] = {}
    for stage in stages:
        for first, last in stage.ranks:
            for rank in range(first, last):
                layers_of.setdefault(rank, set()).update(range(stage.first, stage.last))
    assert layers_of == held(fixture.job)


def held(job: dict[str, Any]) -> dict[int, set[int]]:
    """The layers of each global rank, from the names of the parameters that it had."""
    found = {}
    for rank in job["ranks"]:
        names = [name for parameter in rank["params"] for name in parameter["canonical"]]
        found[rank["rank"]] = {int(layer) for name in names for layer in LAYER.findall(name)}
    return found


def test_pipeline_ranks_may_run_before_data_ranks() -> None:
    grid = RankGrid(ParallelLayout(2, 2, 1, 1, 2, 1, 3, 12), pipeline_first=True)
    assert _ranks(grid, 1) == ((2, 4), (6, 8), (10, 12))
    for pipeline in range(2):
        ranks = [rank for first, last in _ranks(grid, pipeline) for rank in range(first, last)]
        assert all(grid.coordinates(rank)[3] == pipeline for rank in ranks)
