"""Test that processes share a verification and a comparison, with the result of a single process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from mcore_ckpt_ext.operations import content
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.operations.workers import share_of
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import flip, payload_position
from tests.harness.teams import in_team

MATRIX = "decoder.layers.1.mlp.linear_fc1.weight"


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 7))
def test_each_item_is_in_one_share_and_no_share_is_much_larger(sizes: list[int], size: int) -> None:
    shares = [share_of(sizes, rank, size) for rank in range(size)]
    assert sorted(position for share in shares for position in share) == list(range(len(sizes)))
    loads = [sum(sizes[position] for position in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["p10", "p08", "p31", "p50"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_shared_verification_finds_what_a_single_process_finds(name: str, size: int) -> None:
    run = fixture_named(name).run
    alone = verify(run)
    assert alone.sound
    assert in_team(size, lambda team: verify(run, team=team)) == [alone] * size


def test_damage_is_found_whoever_has_it_in_its_share(tmp_path: Path) -> None:
    copy = fixture_named("p05").copy_to(tmp_path / "copy")
    checkpoint = open_checkpoint(copy.run)
    for kind, element in ((FP32_PARAM, 0), (WEIGHT, 5)):
        path, position = payload_position(checkpoint, kind, MATRIX, element)
        flip(path, position + 1)
    alone = verify(copy.run)
    assert not alone.sound and len(alone.findings) > 1
    assert in_team(3, lambda team: verify(copy.run, team=team)) == [alone] * 3
    original = fixture_named("p05").run
    difference = compare(original, copy.run)
    assert not difference.tensors_equal
    assert in_team(3, lambda team: compare(original, copy.run, team=team)) == [difference] * 3


@pytest.mark.parametrize("size", [2, 5])
def test_a_shared_comparison_finds_what_a_single_process_finds(size: int) -> None:
    a, b = fixture_named("p08").run, fixture_named("p08b").run
    alone = compare(a, b)
    assert in_team(size, lambda team: compare(a, b, team=team)) == [alone] * size


def test_each_parameter_is_read_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    original = content.ContentCheck.check

    def check(self: content.ContentCheck, name: str) -> content.ParameterReport:
        checked.append(name)
        return original(self, name)

    monkeypatch.setattr(content.ContentCheck, "check", check)
    run = fixture_named("p10").run
    in_team(3, lambda team: verify(run, team=team))
    assert len(checked) == len(set(checked)) == len(open_checkpoint(run).names(WEIGHT))
