"""Test the files of the legacy format that the package writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext import Legacy, convert, open_checkpoint
from mcore_ckpt_ext.continuity.cyclic import HISTORY
from mcore_ckpt_ext.errors import UnsupportedCheckpointError
from mcore_ckpt_ext.formats.legacy.flat_state import check_within_buckets
from mcore_ckpt_ext.formats.legacy.target_arguments import reader_arguments
from mcore_ckpt_ext.layout.grad_buffer import BufferParameter, PackingRule, pack
from mcore_ckpt_ext.layout.local_model import ModelRank
from mcore_ckpt_ext.layout.packing_proposals import PackedBuffer
from mcore_ckpt_ext.model_space.names import EXTRA_STATE
from tests.harness.checkpoints import fixture_named


def test_the_last_stage_has_the_extra_state_of_an_output_layer(tmp_path: Path) -> None:
    """Megatron's output layer is a linear layer, which always has one."""
    target = mcore_ckpt_ext.Legacy(pipeline_model_parallel_size=2)
    mcore_ckpt_ext.convert(fixture_named("p12").run, tmp_path / "out", target)
    stages = [
        torch.load(tmp_path / f"out/iter_0000004/mp_rank_00_{stage:03d}/model_optim_rng.pt", weights_only=False)
        for stage in range(2)
    ]
    assert [f"output_layer.{EXTRA_STATE}" in stage["model"] for stage in stages] == [False, True]


@pytest.mark.parametrize(("virtual", "is_named"), [(None, True), (1, False)])
def test_model_chunks_that_the_source_had_are_named(virtual: int | None, is_named: bool, tmp_path: Path) -> None:
    target = Legacy(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=virtual)
    notes = convert(fixture_named("p03").run, tmp_path / "legacy", target, dry_run=True).notes
    assert any("2 model chunks (virtual stages) on each pipeline rank" in note for note in notes) == is_named


@pytest.mark.parametrize(("rule", "is_refused"), [(PackingRule.UNTIL_0_12, True), (PackingRule.SINCE_0_13, False)])
def test_a_shared_embedding_before_its_bucket_is_refused(rule: PackingRule, is_refused: bool) -> None:
    """Up to 0.12 the bucket before it ends at 64, which 2 ranks divide, and is padded to 128."""
    parameters = [BufferParameter(640, shared_embedding=True), BufferParameter(60)]
    buckets = pack(parameters, bucket_size=None, data_parallel=2, rule=rule)
    buffer = PackedBuffer("(torch.bfloat16, torch.float32)", ["embedding", "norm"], [(), ()], buckets)
    if not is_refused:
        check_within_buckets(buffer, ModelRank(0, 0, None))
        return
    with pytest.raises(UnsupportedCheckpointError, match="64 elements of embedding before .* 0.13 or later"):
        check_within_buckets(buffer, ModelRank(0, 0, None))


def test_a_conversion_keeps_how_cyclic_data_were_read(tmp_path: Path) -> None:
    """The files of fewer data-parallel ranks name those that have read the epoch so far."""
    source = open_checkpoint(fixture_named("p02").run)
    job = source.job.arguments().replace(dataloader_type="cyclic")
    reader = reader_arguments(
        replace(source, job=replace(source.job, arguments=lambda: job)), Legacy(tensor_model_parallel_size=4)
    )
    assert (job.data_parallel_size, reader.data_parallel_size) == (2, 1)
    assert [layout["data_parallel"] for layout in reader.raw[HISTORY]] == [2, 1]
