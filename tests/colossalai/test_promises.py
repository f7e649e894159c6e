"""Test what `tests/gpu/test_colossalai.py` tests on GPUs, with the devices redirected to the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from colossalai_on_cpu import ranks
from torch import nn

from tests.colossalai.models import Everything, TinyGPT, gpt2
from tests.colossalai.promises import check_a_resume


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("build", "placement", "dtype", "device"),
    [
        (TinyGPT, "static", torch.float16, "cuda"),
        (TinyGPT, "auto", torch.bfloat16, "cpu"),
        (Everything, "full offload", torch.bfloat16, "cpu"),
        (gpt2, "optimizer offload", torch.float16, "cpu"),
    ],
)
def test_a_resume(
    build: Callable[[], nn.Module], placement: str, dtype: torch.dtype, device: str, world_size: int
) -> None:
    assert set(ranks.run(world_size, check_a_resume, build, placement, dtype)) == {device}
