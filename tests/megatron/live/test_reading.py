"""Test the plan of one rank's optimizer state, with a simulated rank's shards of a real checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt_ext.errors import UnreadableCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.megatron.live.reading import Reading
from mcore_ckpt_ext.rehearsal.ranks import SimulatedJob
from mcore_ckpt_ext.versions import Version
from tests.harness.checkpoints import fixture_named


def test_damage_is_found_while_planning(tmp_path: Path) -> None:
    """Later, other ranks would have written a part of their state already."""
    copy = fixture_named("p10").copy_to(tmp_path / "copy")
    checkpoint = open_checkpoint(copy.run)
    shards = [
        held.shard for held in SimulatedJob(checkpoint, checkpoint.job.arguments(), Version(0, 19)).parts_of_stage(0)
    ]
    assert Reading(checkpoint, shards, accept_lost=False).kinds == ("exp_avg", "exp_avg_sq")
    damaged = open_checkpoint(copy.run)
    assert damaged.names("exp_avg")  # reads its common state, which is in the same files
    for path in copy.iteration.glob("*.distcp"):
        path.chmod(0o644)
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(UnreadableCheckpointError):
        Reading(damaged, shards, accept_lost=False)
