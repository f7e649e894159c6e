"""Compare the packing rules with Megatron's own layout function and real buffers, version by version."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt_ext.layout.grad_buffer import BufferParameter, PackingRule, pack
from tests.harness.checkpoints import CORRUPTED, INTACT, fixture_named


@settings(max_examples=300)
@given(
    parameters=st.lists(st.builds(BufferParameter, st.integers(1, 3000), st.booleans()), min_size=1, max_size=12),
    bucket_size=st.none() | st.integers(1, 5000),
    data_parallel=st.sampled_from([1, 2, 3, 6, 8, 96]),
    high_bandwidth=st.booleans(),
)
def test_equals_megatrons_own_layout(
    parameters: list[BufferParameter], bucket_size: int | None, data_parallel: int, high_bandwidth: bool
) -> None:
    # Imported here, for it takes seconds.
    distributed = pytest.importorskip("megatron.core.distributed", reason="needs megatron-core 0.18 or later")
    optimizer = pytest.importorskip("megatron.core.optimizer.distrib_optimizer")
    live = []
    for parameter in parameters:
        tensor = torch.nn.Parameter(torch.empty(parameter.numel, device="meta"))
        tensor.shared_embedding = parameter.shared_embedding  # type: ignore[attr-defined]
        live.append(tensor)
    config = distributed.DistributedDataParallelConfig(
        use_distributed_optimizer=True, pad_buckets_for_high_nccl_busbw=high_bandwidth
    )
    full = optimizer.DistributedOptimizer.compute_full_param_layout(live, bucket_size, data_parallel, config)
    (theirs,) = full.layouts.values()
    ours = pack(parameters, bucket_size=bucket_size, data_parallel=data_parallel, high_bandwidth=high_bandwidth)
    assert [(bucket.start, bucket.stop) for bucket in ours] == theirs.bucket_indices
    assert [bucket.numel_unpadded for bucket in ours] == theirs.per_bucket_numel_unpadded
    places = {
        index: (bucket.start + start, bucket.start + stop, number)
        for number, bucket in enumerate(ours)
        for index, start, stop in bucket.placements
    }
    assert [places[index] for index in range(len(live))] == [theirs.param_index_map[tensor] for tensor in live]


RULES = {
    "core_v0.7.0": PackingRule.UNTIL_0_7,
    "core_v0.8.0": PackingRule.UNTIL_0_8,
    "core_v0.12.1": PackingRule.UNTIL_0_12,
}


# A job without distributed optimizer aligns nothing.
# Without distributed optimizer there are no such buffers, and the jobs that wrote zarr did not report theirs.
@pytest.mark.parametrize("name", [name for name in (*INTACT, *CORRUPTED) if "plain" not in name and "zarr" not in name])
def test_equals_the_buffers_of_real_jobs(name: str) -> None:
    """Every gradient buffer that the job's ranks reported, laid out anew from its parameters' sizes alone."""
    job = fixture_named(name).job
    rule = RULES.get(job["megatron_version"], PackingRule.SINCE_0_13)
    tied = not job["args"]["untie_embeddings_and_output_weights"] and job["layout"]["pp"] > 1
    for rank in job["ranks"]:
        for buffer in rank["buffers"]:
            stored = buffer["params_in_order"]
            shared = {"embedding.word_embeddings.weight", "output_layer.weight"} if tied else set()
            parameters = [BufferParameter(p["end"] - p["start"], p["name"] in shared) for p in reversed(stored)]
            cut = rank["coords"]["pp"] == 0 and buffer["chunk"] == 0 and job["args"]["overlap_grad_reduce"]
            size = job["args"]["ddp_bucket_size"] if cut else None
            buckets = pack(parameters, bucket_size=size, data_parallel=buffer["dp_group_size"], rule=rule)
            assert [b.numel_unpadded for b in buckets] == [b["numel_unpadded"] for b in buffer["buckets"]]
            starts = [b["offset"] for b in buffer["buckets"]]
            placed = zip(starts, buckets, strict=True)
            places = sorted(origin + start for origin, bucket in placed for _, start, _ in bucket.placements)
            assert places == [p["start"] for p in stored]


def test_versions_differ_before_a_shared_embedding() -> None:
    """Up to 0.12 the bucket before a shared embedding is closed at a padded position, since 0.13 it is not."""
    parameters = [BufferParameter(640, shared_embedding=True), BufferParameter(100)]
    old = pack(parameters, bucket_size=None, data_parallel=3, rule=PackingRule.UNTIL_0_12)
    new = pack(parameters, bucket_size=None, data_parallel=3, rule=PackingRule.SINCE_0_13)
    # 100 is aligned to 128, which 3 ranks do not divide: the old rule counts the padding to 384 as content.
    assert [bucket.numel_unpadded for bucket in old] == [384, 640]
    assert [bucket.numel_unpadded for bucket in new] == [128, 640]
    assert [bucket.start for bucket in old] == [bucket.start for bucket in new] == [0, 384]
