"""Test blocks of elements: unusual values are counted exactly, though most blocks take a pass without counting."""

from __future__ import annotations

import pytest
import torch

from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, WEIGHT
from mcore_ckpt_ext.operations import content
from mcore_ckpt_ext.operations.difference_map import DifferenceCounts
from mcore_ckpt_ext.operations.reading import BlockMemory, threads

INF, NAN = float("inf"), float("nan")
LARGEST = torch.finfo(torch.float32).max


def counted(kind: str, values: list[float], dtype: torch.dtype = torch.float32) -> tuple[int, int, int]:
    tally = content.ValueCounts()
    block = torch.cat([torch.ones(100_000), torch.tensor(values)]).to(dtype)
    content.count_values(kind, block, tally)
    return tally.nan, tally.infinite, tally.negative


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (0, 0, 0)), ([NAN], (1, 0, 0)), ([INF], (0, 1, 0)), ([-INF, INF], (0, 2, 1)), ([NAN, INF, NAN], (2, 1, 0)),
        ([-1.0], (0, 0, 1)), ([-0.0], (0, 0, 0)), ([NAN, -1.0], (1, 0, 1)),
    ],
)  # fmt: skip
def test_odd_elements_are_counted(dtype: torch.dtype, values: list[float], expected: tuple[int, int, int]) -> None:
    assert counted(EXP_AVG_SQ, values, dtype) == expected
    assert counted(EXP_AVG, values, dtype) == (*expected[:2], 0)


def test_a_sum_that_overflows_is_no_finding() -> None:
    assert counted(WEIGHT, [LARGEST, LARGEST]) == (0, 0, 0)


def test_an_empty_block_has_nothing_odd() -> None:
    tally = content.ValueCounts()
    content.count_values(EXP_AVG_SQ, torch.empty(0), tally)
    assert (tally.nan, tally.infinite, tally.negative) == (0, 0, 0)


def test_equal_bits_are_equal_and_signed_zeros_are_not() -> None:
    tally = DifferenceCounts()
    tally.count(torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), 0)
    assert tally.different == 0
    tally.count(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), 10)
    assert (tally.different, tally.signed_zeros, tally.first) == (1, 1, (11, "0.0", "-0.0"))


def test_a_thread_reads_into_memory_that_it_has_used() -> None:
    memory = BlockMemory()
    large = memory.allocator(WEIGHT)(1_000, torch.float32)
    small = memory.allocator(WEIGHT)(7, torch.bfloat16)
    assert (small.data_ptr(), small.shape, small.dtype) == (large.data_ptr(), (7,), torch.bfloat16)
    other = memory.allocator(EXP_AVG)(1_000, torch.float32)
    assert other.data_ptr() != large.data_ptr()
    with threads(2) as pool:
        (elsewhere,) = pool.map(lambda use: memory.allocator(use)(1_000, torch.float32), [WEIGHT])
    assert elsewhere.data_ptr() != large.data_ptr()


def test_threads_compute_alone_and_leave_the_number_of_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with threads(2) as pool:
            assert list(pool.map(lambda _: torch.get_num_threads(), range(2))) == [1, 1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
