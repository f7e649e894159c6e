"""Extra states of experts between models that keep one for each and models that keep one for all."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from mcore_ckpt_ext.formats.expert_states import content_of, emptied_state, of_all_experts, of_each_expert

LAYER = "decoder.layers.1.mlp.experts"
GROUPED = f"{LAYER}.linear_fc1._extra_state"
OTHER = "decoder.layers.1.self_attention.linear_qkv._extra_state"


def scales(number: int) -> torch.Tensor:
    return torch.full((8,), number, dtype=torch.uint8)


def experts(*states: Any) -> dict[str, Any]:
    return {f"{LAYER}.experts.{number}.linear_fc1._extra_state": state for number, state in enumerate(states)}


def test_without_fp8_each_expert_has_the_state_of_all() -> None:
    empty = torch.empty(0, dtype=torch.uint8)
    found, notes = of_each_expert({GROUPED: empty, OTHER: scales(3)}, 3)
    assert list(found) == [*experts(0, 0, 0), OTHER]
    assert torch.equal(found[OTHER], scales(3))
    assert not notes
    joined, notes = of_all_experts(found)
    assert not notes
    assert joined.keys() == found.keys()


def test_scales_of_several_experts_are_not_given_to_one_of_them() -> None:
    """Neither one for all, of which the last would survive, nor all for one."""
    found, (note,) = of_each_expert({GROUPED: scales(1)}, 2)
    assert [content_of(state) for state in found.values()] == [b"", b""]
    assert note.startswith("extra states of 1 modules are written empty, because one state there stands for several")
    found, (note,) = of_all_experts({**experts(scales(1), scales(2)), OTHER: scales(3)})
    assert [content_of(state) for state in found.values()] == [b"", b"", b"\3" * 8]
    assert GROUPED in note


def test_equal_scales_stay() -> None:
    found, notes = of_all_experts(experts(scales(1), scales(1)))
    assert [content_of(state) for state in found.values()] == [b"\1" * 8] * 2
    assert not notes


@pytest.mark.parametrize("state", [io.BytesIO(b"scales"), scales(1)])
def test_an_emptied_state_is_of_the_same_type(state: Any) -> None:
    found = emptied_state(state)
    assert type(found) is type(state)
    if isinstance(found, io.BytesIO):
        assert torch.load(found, weights_only=True) is None
