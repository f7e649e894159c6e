"""Test which part of a stored weight a shard of generalized tensor parallelism is, against Megatron's files."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.weight_shards import ShardOfWeight, check_gates, check_no_sharded_gates, weight_shards

GATED, PLAIN = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.self_attention.linear_qkv.weight"
SIZES = list(product((1, 2, 4), (2, 3, 4)))
Grid = tuple[tuple[int, ...], ...]
Shards = dict[tuple[int, int], torch.Tensor]


def drawn(held: list[torch.Tensor], shards: int) -> Shards:
    """The shards of what each tensor-parallel rank holds, as `_gtp_slice_one_param` cuts them."""
    return {
        (rank, shard): part
        for rank, tensor in enumerate(held)
        for shard, part in enumerate(tensor.chunk(shards))
    }  # fmt: skip


def assert_found(name: str, stored: torch.Tensor, grid: Grid, parts: Shards, ranks: int, shards: int) -> None:
    for (rank, shard), part in parts.items():
        regions = ShardOfWeight(rank, ranks, shard, shards).regions(name, tuple(stored.shape), grid)
        assert regions is not None
        cut = [
            stored[tuple(slice(first, first + size) for first, size in zip(region.offsets, region.sizes, strict=True))]
            for region in regions
        ]
        assert torch.equal(torch.cat([piece.flatten() for piece in cut]), part.flatten())


@pytest.mark.parametrize(("ranks", "shards"), SIZES)
def test_rows_that_tensor_parallelism_cuts_too(ranks: int, shards: int) -> None:
    """`make_tp_sharded_tensor_for_checkpoint`: one offset, of `tp_rank * shards + shard`."""
    stored = torch.arange(2 * ranks * shards * 3.0).view(-1, 3)
    parts = drawn(list(stored.chunk(ranks)), shards)
    assert_found(PLAIN, stored, (tuple(range(0, len(stored), 2)), (0,)), parts, ranks, shards)


@pytest.mark.parametrize(("ranks", "shards"), SIZES)
def test_columns_that_tensor_parallelism_cuts(ranks: int, shards: int) -> None:
    stored = torch.arange(2 * shards * 3.0 * ranks).view(2 * shards, -1)
    parts = drawn(list(stored.chunk(ranks, dim=1)), shards)
    grid = (tuple(range(0, 2 * shards, 2)), tuple(range(0, 3 * ranks, 3)))
    assert_found(PLAIN, stored, grid, parts, ranks, shards)


@pytest.mark.parametrize(("ranks", "shards"), SIZES)
def test_a_gated_linear(ranks: int, shards: int) -> None:
    """`apply_swiglu_sharded_factory` files the halves of every shard, whatever they hold."""
    held = [torch.randn(4 * shards, 3) for _ in range(ranks)]
    parts = drawn(held, shards)
    halves = [[part.chunk(2)[half] for part in parts.values()] for half in (0, 1)]
    stored = torch.cat([*halves[0], *halves[1]])
    assert_found(GATED, stored, (tuple(range(0, len(stored), 2)), (0,)), parts, ranks, shards)


@pytest.mark.parametrize("grid", [((0, 1, 2), (0,)), ((0, 2), (0, 1, 2)), ((0, 1, 2, 3), (0, 2))])
def test_another_pattern_is_not_known(grid: Grid) -> None:
    assert ShardOfWeight(0, 2, 0, 2).regions(PLAIN, (4, 4), grid) is None
    assert ShardOfWeight(0, 2, 0, 2).regions(PLAIN, (4, 4, 4), (*grid, (0,))) is None


def job(tensor: int, shards: int | None, *, swiglu: bool = True) -> JobArguments:
    stated = {} if shards is None else {"gtp_weight_remat_size": shards}
    return JobArguments.of({"tensor_model_parallel_size": tensor, "swiglu": swiglu, **stated})


@pytest.mark.parametrize(
    ("written", "running", "fits"),
    [
        (job(1, 2), job(1, 2), True),
        (job(1, 2), job(1, 1), False),
        (job(1, None), job(1, 2), False),
        (job(1, 2), job(2, 2), False),
        (job(1, None), job(2, 1), True),
        (job(1, 2, swiglu=False), job(2, 1, swiglu=False), True),
    ],
)
def test_gates_are_confused_where_shards_change(written: JobArguments, running: JobArguments, fits: bool) -> None:
    if fits:
        check_gates(written, running, "here")
    else:
        with pytest.raises(UnsupportedCheckpointError, match="mixes up the rows of gated linears"):
            check_gates(written, running, "here")


def test_sharded_gates_are_refused() -> None:
    check_no_sharded_gates(job(2, 1), "here")
    check_no_sharded_gates(job(1, 2, swiglu=False), "here")
    with pytest.raises(UnsupportedCheckpointError, match="found: gated linears, and 2 weight shards"):
        check_no_sharded_gates(job(1, 2), "here")


@pytest.mark.parametrize("stated", [0, -2, 2.0, "2", True, 1 << 20])
def test_impossible_numbers(stated: object) -> None:
    with pytest.raises(UnreadableCheckpointError, match="impossible number of weight shards"):
        weight_shards(JobArguments.of({"gtp_weight_remat_size": stated}))
