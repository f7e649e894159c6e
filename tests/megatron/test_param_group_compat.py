"""Test comparisons of stored parameter groups with those of live optimizers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt_ext.megatron.live.optimizer_adapters.detection import Chain
from mcore_ckpt_ext.megatron.param_group_compat import has_as_many_groups


def chain(*groups: int, distributed: bool = False) -> Chain:
    """Optimizers of whole parameters with so many groups each, perhaps with a DistributedOptimizer after them."""
    whole = [(SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{}] * number)), None) for number in groups]
    return Chain([SimpleNamespace()] if distributed else [], whole, [])


@pytest.mark.parametrize(("stored", "live", "is_alike"), [
    ([], chain(2), True),
    ([2], chain(2), True),
    ([2], chain(3), False),
    ([2, 1], chain(2), False),
    ([2, 1], chain(2, distributed=True), True),
    ([2, 1], chain(1, distributed=True), False),
])  # fmt: skip
def test_numbers_of_groups(stored: list[int], live: Chain, is_alike: bool) -> None:
    """The groups of a DistributedOptimizer may be stored, after the others, or not."""
    children = {at: {"optimizer": {"param_groups": [{}] * number}} for at, number in enumerate(stored)}
    common: dict[str, Any] = {"optimizer": children} if stored else {}
    assert has_as_many_groups(common, live) == is_alike
