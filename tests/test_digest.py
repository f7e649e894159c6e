"""The digest of a parameter's state: its parts add up, it knows where a value lies, and it never changes."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from mcore_ckpt_ext.layout import digest
from mcore_ckpt_ext.layout.digest import added, digest_of, read, written
from mcore_ckpt_ext.layout.sidecar import RecordedDigests, Sidecar

numbers = some.lists(some.integers(-(2**15), 2**15 - 1), min_size=2, max_size=40)


def remainders(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int16)


@settings(max_examples=60, deadline=None)
@given(values=numbers, cut=some.integers(0, 40), start=some.integers(0, 3 * 2**20))
def test_the_parts_of_ranks_add_up(values: list[int], cut: int, start: int) -> None:
    state = remainders(values)
    one, other = digest_of(state[:cut], start), digest_of(state[cut:], start + len(state[:cut]))
    assert added(one, other) == digest_of(state, start)


def test_parts_add_up_across_the_blocks_of_its_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_BLOCK", 7)
    digest._multipliers.cache_clear()
    for dtype in (torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64):
        state = torch.arange(100).to(dtype)
        whole = digest_of(state, 3)
        assert {added(digest_of(state[:cut], 3), digest_of(state[cut:], 3 + cut)) for cut in range(100)} == {whole}
    digest._multipliers.cache_clear()


@settings(max_examples=60, deadline=None)
@given(values=numbers, one=some.integers(0, 39), other=some.integers(0, 39), by=some.integers(1, 3 * 2**20))
def test_it_tells_states_apart(values: list[int], one: int, other: int, by: int) -> None:
    state = remainders(values)
    one, other = one % len(values), other % len(values)
    exchanged = state.clone()
    exchanged[[one, other]] = state[[other, one]]
    assert (digest_of(exchanged) == digest_of(state)) == torch.equal(exchanged, state)
    flipped = state.clone()
    flipped[one] ^= 1
    assert digest_of(flipped) != digest_of(state)
    assert (digest_of(state, by) == digest_of(state)) == (not state.any())  # the neighbour's place
    assert digest_of(state[:-1]) != digest_of(state)  # whatever the last one is, zero too


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.int16, "f2c5369180573bc2"), (torch.float32, "4c018864f69f6410"), (torch.bfloat16, "baf996d85ca7c7f0")],
)
def test_it_is_the_same_in_every_release(dtype: torch.dtype, expected: str) -> None:
    """Sidecars outlive releases."""
    assert written(digest_of(torch.arange(-1000, 1000).to(dtype), 2**20 - 7)) == expected


def sidecar_with(digests: tuple[RecordedDigests, ...]) -> Sidecar:
    return Sidecar("test", "0.19.2", 4, {"tensor": 1}, (), None, digests)


def test_a_sidecar_keeps_it() -> None:
    sidecar = sidecar_with((RecordedDigests(0, 3, {"a.weight": {"exp_avg": written(7)}}),))
    assert Sidecar.from_json(sidecar.to_json()) == sidecar
    assert read(sidecar.digests[0].parameters["a.weight"]["exp_avg"]) == 7


def test_a_sidecar_of_an_earlier_release_has_none() -> None:
    earlier = json.loads(sidecar_with(()).to_json())
    del earlier["digests"]
    assert Sidecar.from_json(json.dumps(earlier)) == sidecar_with(())


@pytest.mark.parametrize(
    "digests", [[{"child": 0}], [7], {"a": 1}, [{"child": 0, "index": 0, "parameters": {"a": {"b": "xyz"}}}]]
)
def test_digests_that_are_none_make_no_sidecar(digests: object) -> None:
    text = json.dumps({**json.loads(sidecar_with(()).to_json()), "digests": digests})
    with pytest.raises(ValueError, match=r"lacks or misspells|invalid literal"):
        Sidecar.from_json(text)
