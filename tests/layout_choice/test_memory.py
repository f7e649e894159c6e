"""Test the memory of a rank: the copies that Megatron makes of weights while it loads a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.layout_choice.choice import Choice
from mcore_ckpt_ext.layout_choice.memory import Buffers, Memory, memory_of
from mcore_ckpt_ext.layout_choice.stage_activations import StageActivations
from mcore_ckpt_ext.layout_choice.stage_split import stage_splits
from mcore_ckpt_ext.operations.parameter_table import table_of
from mcore_ckpt_ext.versions import NEWEST
from tests.harness.checkpoints import fixture_named


@pytest.mark.parametrize(("name", "is_gated"), [("p01", False), ("p02", True), ("p09", True), ("p22", True)])
def test_weights_that_are_joined_are_those_of_genuine_ranks(name: str, is_gated: bool) -> None:
    """Megatron copies the gated first projection of every MLP and expert, and no other weight."""
    fixture = fixture_named(name)
    checkpoint = open_checkpoint(fixture.run)
    job, layout = checkpoint.job.arguments(), checkpoint.job.layout
    split = next(stage_splits(job, layout.pipeline, layout.virtual_pipeline, NEWEST))
    choice = Choice(job, table_of(checkpoint, job), layout, split, 1, 8, NEWEST)
    held = choice.table.stages(split.ranges, layout.tensor, layout.expert_tensor, layout.expert)
    planned = [memory_of(stage, choice, Buffers(4), StageActivations(0, 0, 0)).loading for stage in held]
    genuine = dict.fromkeys(range(layout.pipeline), 0)
    for rank in fixture.job["ranks"]:
        projections = [one for one in rank["params"] if "linear_fc1.weight" in one["local_name"]]
        genuine[rank["coords"]["pp"]] = 2 * sum(prod(shape) for one in projections for shape in one["local_shape"])
    assert bool(job.swiglu) is is_gated
    assert planned == ([*genuine.values()] if is_gated else [0] * layout.pipeline)


def test_megatron_joins_gate_and_up_projection_in_a_copy() -> None:
    """What is read into a weight in the buffer of all weights is copied, though it is in its place already."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    weight = torch.arange(32.0)[:24].view(6, 4)
    factory = apply_swiglu_sharded_factory(ShardedTensor.from_rank_offsets("weight", weight), ())
    parts = [part.data for part in factory.build()]
    assert {part.untyped_storage().data_ptr() for part in parts} == {weight.untyped_storage().data_ptr()}
    joined = factory.merge_fn(parts)
    assert torch.equal(joined, weight)
    assert joined.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()


def test_copies_count_as_allocated_and_not_as_needed() -> None:
    """Where there is no room for them, Megatron makes them on the host."""
    memory = Memory(weights=100, gradients=200, optimizer=0, activations=10, loss=20, context=5, loading=60)
    assert (memory.needed, memory.allocated, memory.total) == (330, 360, 335)
    assert replace(memory, activations=50).allocated == 370
