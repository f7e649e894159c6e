"""Compare simulated ranks with genuine ones: the parts of every parameter in each rank's optimizer."""

from __future__ import annotations

import re

import pytest

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.layout.local_model import ModelRank
from mcore_ckpt_ext.rehearsal.data_parallel import DataParallelRanks
from mcore_ckpt_ext.rehearsal.ranks import SimulatedJob, SimulatedShard
from mcore_ckpt_ext.versions import OLDEST, Version, parse_version
from tests.harness.checkpoints import INTACT, fixture_named


def version_of(name: str) -> Version | None:
    """The release that wrote a fixture."""
    found = re.search(r"\d+\.\d+", fixture_named(name).job["megatron_version"])
    return parse_version(found[0]) if found else None


OF_TODAY = [
    name for name in INTACT if "ranks" in fixture_named(name).job and (version_of(name) or OLDEST) >= Version(0, 13)
]


def test_there_are_fixtures() -> None:
    assert len(OF_TODAY) >= 10


@pytest.mark.parametrize("name", OF_TODAY)
def test_every_rank_holds_what_the_genuine_one_held(name: str) -> None:
    """Elements of each parameter, rank by rank, under the layout of the job that wrote the checkpoint."""
    fixture = fixture_named(name)
    checkpoint, version = open_checkpoint(fixture.run), version_of(name)
    assert version is not None
    job = SimulatedJob(checkpoint, checkpoint.job.arguments(), version)
    ranks = DataParallelRanks(job, checkpoint, version)
    by_place: dict[ModelRank, list[SimulatedShard]] = {}
    for stage in range(job.layout.pipeline):
        for held in job.parts_of_stage(stage):
            for place in held.places:
                by_place.setdefault(place, []).append(held.shard)
    for genuine in fixture.job["ranks"]:
        simulated = [
            (shard.name, shard.slice.start, shard.slice.stop) for shard in ranks.shards(genuine["rank"], by_place)
        ]
        held_by_it = [
            (one["canonical"][0], *one["optim"]["param"]) for one in genuine["params"] if one["optim"] is not None
        ]
        assert sorted(simulated) == sorted(held_by_it), genuine["coords"]


def test_places_with_context_parallelism() -> None:
    """Megatron numbers ranks by tensor, context, data and pipeline place, in this order, the first one fastest, and
    divides the buffers among the context and data ranks of a place (`RankGenerator.get_ranks` and
    `get_data_parallel_group(with_context_parallel=True)`, core/parallel_state.py, core_v0.19.0).
    """
    checkpoint = open_checkpoint(fixture_named("p01").run)
    sizes = {
        "world_size": 8,
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 2,
    }
    version = Version(0, 19)
    job = SimulatedJob(checkpoint, checkpoint.job.arguments().replace(**sizes), version)
    ranks = DataParallelRanks(job, checkpoint, version)
    found = [ranks.places(rank) for rank in range(8)]
    assert found == [[(ModelRank(0, rank % 2), rank // 2)] for rank in range(8)]
