"""Test the digest of a parameter's state: parts add up, positions count, and its definition never changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import PackingError, ProofError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.layout import additive_digest
from mcore_ckpt_ext.layout.additive_digest import digest_tensor, format_digest, join_digests, parse_digest
from mcore_ckpt_ext.layout.sidecar import FILE_NAME, RecordedDigests, Sidecar
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.optimizers import digests
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.damage import recorded_digests

NAME = "decoder.layers.1.mlp.linear_fc1.weight"

numbers = some.lists(some.integers(-(2**15), 2**15 - 1), min_size=2, max_size=40)


def remainders(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int16)


@settings(max_examples=60)
@given(values=numbers, cut=some.integers(0, 40), start=some.integers(0, 3 * 2**20))
def test_the_parts_of_ranks_add_up(values: list[int], cut: int, start: int) -> None:
    state = remainders(values)
    one, other = digest_tensor(state[:cut], start), digest_tensor(state[cut:], start + len(state[:cut]))
    assert join_digests(one, other) == digest_tensor(state, start)


def test_parts_add_up_across_the_blocks_of_its_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(additive_digest, "_BLOCK", 7)
    additive_digest._word_factors.cache_clear()
    for dtype in (torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64):
        state = torch.arange(100).to(dtype)
        whole = digest_tensor(state, 3)
        assert {
            join_digests(digest_tensor(state[:cut], 3), digest_tensor(state[cut:], 3 + cut)) for cut in range(100)
        } == {whole}
    additive_digest._word_factors.cache_clear()


@settings(max_examples=60)
@given(values=numbers, one=some.integers(0, 39), other=some.integers(0, 39), by=some.integers(1, 3 * 2**20))
def test_it_distinguishes_states(values: list[int], one: int, other: int, by: int) -> None:
    state = remainders(values)
    one, other = one % len(values), other % len(values)
    exchanged = state.clone()
    exchanged[[one, other]] = state[[other, one]]
    if (values[one] - values[other]) % 2:  # other differences do not show in every pair of places
        assert digest_tensor(exchanged) != digest_tensor(state)
    flipped = state.clone()
    flipped[one] ^= 1
    assert digest_tensor(flipped) != digest_tensor(state)
    if values[0] % 2 or not state.any():
        assert (digest_tensor(state, by) == digest_tensor(state)) == (not state.any())  # the neighbor's place
    assert digest_tensor(state[:-1]) != digest_tensor(state)  # whatever the last one is, zero too


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.int16, "f2c5369180573bc2"), (torch.float32, "4c018864f69f6410"), (torch.bfloat16, "baf996d85ca7c7f0")],
)
def test_it_is_the_same_in_every_release(dtype: torch.dtype, expected: str) -> None:
    """Sidecars outlive releases."""
    assert format_digest(digest_tensor(torch.arange(-1000, 1000).to(dtype), 2**20 - 7)) == expected


def sidecar_with(digests: tuple[RecordedDigests, ...]) -> Sidecar:
    return Sidecar("test", "0.19.2", 4, {"tensor": 1}, (), None, digests)


def test_a_sidecar_keeps_it() -> None:
    sidecar = sidecar_with((RecordedDigests(0, 3, {"a.weight": {"exp_avg": format_digest(7)}}),))
    assert Sidecar.from_json(sidecar.to_json()) == sidecar
    assert parse_digest(sidecar.digests[0].parameters["a.weight"]["exp_avg"]) == 7


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


@pytest.fixture
def recorded(tmp_path: Path) -> Fixture:
    """Masters as remainders, with the digests of the live state in a sidecar that tells nothing else."""
    fixture = fixture_named("p47").copy_to(tmp_path / "copy")
    (fixture.iteration / FILE_NAME).write_text(sidecar_with(recorded_digests(fixture, "exp_avg")).to_json())
    return fixture


def edit(fixture: Fixture, change: Callable[[dict[str, dict[str, str]]], object]) -> None:
    """Change what is recorded of the first group."""
    content = json.loads((fixture.iteration / FILE_NAME).read_text())
    change(content["digests"][0]["parameters"])
    (fixture.iteration / FILE_NAME).write_text(json.dumps(content))


class TestOfACheckpoint:
    def test_verify_compares_all_that_was_recorded(self, recorded: Fixture) -> None:
        found = verify(recorded.run)
        assert found.sound
        assert [check.extent for check in found.checks if check.name == "optimizer digests"] != []

        edit(recorded, lambda parameters: parameters[NAME].update(exp_avg=format_digest(7)))
        (finding,) = verify(recorded.run).findings
        assert (finding.check, finding.severity) == ("optimizer digests", "error")
        assert f"exp_avg of {NAME} at " in finding.what
        assert "digest " in finding.what and ", 0000000000000007" in finding.what

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda found: found[NAME].update(param_remainder=format_digest(7)), "0000000000000007"),
            (lambda found: found.pop(NAME), f"param_remainder of {NAME} in .*: no digest of it was recorded"),
        ],
    )
    def test_remainders_that_are_not_those_that_were_saved_are_refused(
        self, recorded: Fixture, change: Callable[[dict[str, dict[str, str]]], object], says: str, tmp_path: Path
    ) -> None:
        edit(recorded, change)
        assert not verify(recorded.run).sound
        expected = f"places of the parameters are not certain.*{says}.*use another iteration"
        with pytest.raises(PackingError, match=expected):
            mcore_ckpt_ext.convert(recorded.run, tmp_path / "out", mcore_ckpt_ext.TorchDist())
        assert not (tmp_path / "out").exists()

    def test_damage_outside_the_samples_is_refused_before_anything_is_written(
        self, recorded: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(digests, "_ENOUGH", 64)
        edit(recorded, lambda parameters: parameters[NAME].update(param_remainder=format_digest(7)))
        with pytest.raises(ProofError, match=f"have changed since they were saved; found: param_remainder of {NAME}"):
            mcore_ckpt_ext.convert(recorded.run, tmp_path / "out", mcore_ckpt_ext.TorchDist())
        assert not (tmp_path / "out").exists()

    def test_they_make_an_order_certain_that_nothing_else_shows(self, recorded: Fixture) -> None:
        """Modules of the user's own may be registered in any order."""
        checkpoint = open_checkpoint(recorded.run)
        checkpoint.job.common()["args"].spec = ["my.spec", "layers"]
        assert torch.equal(checkpoint.tensor("fp32_param", NAME).read(), recorded.truth[f"fp32_param.{NAME}"])
        (recorded.iteration / FILE_NAME).unlink()
        checkpoint = open_checkpoint(recorded.run)
        checkpoint.job.common()["args"].spec = ["my.spec", "layers"]
        with pytest.raises(PackingError, match="expected: a sidecar, or chunk borders"):
            checkpoint.names("fp32_param")
