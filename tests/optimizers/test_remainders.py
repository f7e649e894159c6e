"""Test masters that are split into weights and remainders, and joined again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcore_ckpt_ext.optimizers.remainders import are_numbers_of_remainders, join, split

BITS = st.integers(0, 2**32 - 1)


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor([number - 2**32 if number >= 2**31 else number for number in bits], dtype=torch.int32).view(
        torch.float32
    )


@settings(max_examples=300)
@given(st.lists(BITS, min_size=1, max_size=64))
@example([0x3F808000, 0x3F818000, 0xBF808000, 0x3F80FFFF, 0x3FFFFFFF, 0x7F7FFFFF, 0xFF7F8000, 0x00000001, 0x80000000])
def test_split_then_join_is_the_identity(bits: list[int]) -> None:
    """For every bit pattern: ties, carries into the exponent, the largest numbers, subnormal ones, signed zeros."""
    masters = from_bits(bits)
    weights, remainders = split(masters)
    assert (weights.dtype, remainders.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(weights, remainders).view(torch.int32), masters.view(torch.int32))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
def test_weights_are_masters_rounded_to_nearest_but_for_ties(numbers: list[float]) -> None:
    masters = torch.tensor(numbers, dtype=torch.float32)
    weights, remainders = split(masters)
    ties = remainders == -(2**15)
    assert torch.equal(weights[~ties].view(torch.int16), masters[~ties].bfloat16().view(torch.int16))


@pytest.mark.parametrize(
    ("master", "weight", "remainder"),
    [
        (0x3F808000, 0x3F81, -0x8000),  # a tie goes away from zero, though 0x3F80 is even
        (0xBF808000, 0xBF81, -0x8000),
        (0x3F807FFF, 0x3F80, 0x7FFF),
        (0x3F80FFFF, 0x3F81, -1),
        (0x3FFFFFFF, 0x4000, -1),  # the carry reaches the exponent
    ],
)
def test_the_rule_of_the_kernel(master: int, weight: int, remainder: int) -> None:
    weights, remainders = split(from_bits([master]))
    assert (int(weights.view(torch.int16)) & 0xFFFF, int(remainders)) == (weight, remainder)


def test_shapes_are_kept() -> None:
    masters = torch.randn(3, 5, 2)
    weights, remainders = split(masters)
    assert weights.shape == remainders.shape == join(weights, remainders).shape == masters.shape
    scalar = torch.tensor(1.5)
    assert join(*split(scalar)) == scalar


def test_numbers_of_remainders_are_recognized() -> None:
    assert are_numbers_of_remainders(torch.tensor([-32768.0, 0.0, 32767.0]))
    for other in (0.5, 32768.0, float("nan"), float("inf")):
        assert not are_numbers_of_remainders(torch.tensor([0.0, other]))
