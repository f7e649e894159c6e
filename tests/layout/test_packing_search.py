"""Test how a search by content distinguishes parameters with the same values: by the order of other layers."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext.errors import PackingError
from mcore_ckpt_ext.layout.buckets import BucketKey, OptimizerGroup
from mcore_ckpt_ext.layout.local_model import ModelRank
from mcore_ckpt_ext.layout.packing_search import _Assignment, _Spot


def assigned(*spots: str) -> list[str]:
    """Solve spots of one buffer; each is a list of parameters that match, such as `0.a 0.b` of layer 0."""
    key = BucketKey(0, "bf16", 0)
    fitting = [{f"decoder.layers.{name}": () for name in spot.split()} for spot in spots]
    found = _Assignment(
        OptimizerGroup(0, 0, ModelRank(0, 0), range(1), {}), [_Spot(key, 0, names) for names in fitting]
    ).solve()
    return [name.removeprefix("decoder.layers.") for name in found]


def test_a_parameter_follows_the_same_one_as_in_another_layer() -> None:
    assert assigned("1.a", "1.b 1.c", "0.a", "0.b") == ["1.a", "1.b", "0.a", "0.b"]


def test_what_follows_an_unknown_parameter_is_unknown() -> None:
    with pytest.raises(PackingError, match="cannot distinguish"):
        assigned("2.a", "2.b", "1.b", "1.a", "0.a 0.b", "0.a 0.b")
