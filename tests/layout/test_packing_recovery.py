"""Test the recovery of packing on real checkpoints: every element of every kind equals the live job's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import ModelMismatchError, PackingError
from mcore_ckpt_ext.formats.checkpoint import Checkpoint
from mcore_ckpt_ext.formats.legacy.reader import STORED_ORDER
from mcore_ckpt_ext.formats.parts import Job
from mcore_ckpt_ext.layout import parameter_order
from mcore_ckpt_ext.layout.sidecar import Sidecar
from mcore_ckpt_ext.model_space.slices import Region
from mcore_ckpt_ext.transfer import read_slice
from tests.harness.checkpoints import Fixture, fixture_named, part_of, recorded_layout
from tests.harness.damage import wrong_masters

KINDS = ("weight", "fp32_param", "exp_avg", "exp_avg_sq")


def assert_equals_truth(checkpoint: Checkpoint, truth: dict[str, torch.Tensor]) -> None:
    """Bit for bit, and neither a tensor too many nor one too few."""
    names = {f"{kind}.{name}" for kind in checkpoint.kinds() for name in checkpoint.names(kind)}
    assert names == set(truth)
    for key, expected in truth.items():
        kind, _, name = key.partition(".")
        values = checkpoint.tensor(kind, name).read()
        assert (values.dtype, values.shape) == (expected.dtype, expected.shape), key
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8)), key


def test_everything_equals_the_truth(checkpoint_fixture: Fixture) -> None:
    checkpoint = mcore_ckpt_ext.open_checkpoint(checkpoint_fixture.run)
    job = checkpoint_fixture.job
    assert checkpoint.optimizer.format() == job["sharding_type"]
    assert checkpoint.job.iteration() == job["iteration"]
    layout = job["layout"]
    found = checkpoint.job.layout
    assert (found.tensor, found.pipeline, found.virtual_pipeline) == (layout["tp"], layout["pp"], layout["vpp"] or 1)
    assert (found.data, found.context, found.world) == (layout["dp"], layout["cp"], job["world_size"])
    assert checkpoint.job.args["num_layers"] == job["args"]["num_layers"]
    assert checkpoint.job.common()["opt_param_scheduler"] == job["scheduler"]
    assert_equals_truth(checkpoint, checkpoint_fixture.truth)


def test_one_state_in_four_formats_and_three_versions_is_one() -> None:
    truths = [fixture_named(name).truth for name in ("p01", "p04", "p05", "p06")]
    for truth in truths[1:]:
        assert truth.keys() == truths[0].keys()
        assert all(torch.equal(truth[key], truths[0][key]) for key in truth)


def test_shifted_masters_are_repaired_and_lost_ones_named(corrupted_fixture: Fixture) -> None:
    """Exactly the corrupted tensors are named; every element that is anywhere on disk is found; the rest is refused."""
    checkpoint = mcore_ckpt_ext.open_checkpoint(corrupted_fixture.run)
    state = checkpoint.optimizer.state()
    assert set(state.shifted) == wrong_masters(corrupted_fixture)
    for key, expected in corrupted_fixture.truth.items():
        kind, _, name = key.partition(".")
        lost = state.lost_intervals(kind, name) if kind != "weight" else []
        if not lost:
            assert torch.equal(checkpoint.tensor(kind, name).read(), expected), key
            continue
        with pytest.raises(ModelMismatchError, match=name):
            checkpoint.tensor(kind, name).read()
        for stored in state.stored_slices(kind, name):
            values = read_slice(state, checkpoint.files.transfer, kind, stored.slice)
            assert torch.equal(values, part_of(expected, stored.slice)), key
    assert 0 < sum(state.lost_elements().values()) < 400


def test_the_lost_elements_are_those_of_an_independent_simulation() -> None:
    """p23 comes with a simulation of the writer: what is lost, element by element."""
    fixture = fixture_named("p23")
    state = mcore_ckpt_ext.open_checkpoint(fixture.run).optimizer.state()
    simulated = fixture.job["corruption"]
    assert state.shifted == simulated["affected_tensors"]
    for name, counts in simulated["per_param"].items():
        assert state.lost_intervals("exp_avg", name) == [tuple(interval) for interval in counts["lost_ranges"]]


def test_discovery_by_content_finds_every_layout(flat_fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all witnesses withheld the bytes alone give the same layout; the proof confirms it."""
    monkeypatch.setattr(Job, "orders", lambda self: [])
    checkpoint = mcore_ckpt_ext.open_checkpoint(flat_fixture.run)
    assert_equals_truth(checkpoint, flat_fixture.truth)
    assert checkpoint.optimizer.state().order_sources() == ["discovery by content"]


def test_a_wrong_order_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the order of the other spec at hand: it is refused, and discovery takes over."""
    fixture = fixture_named("p01")
    monkeypatch.setattr(Job, "orders", lambda self: [parameter_order.TRANSFORMER_ENGINE])
    checkpoint = mcore_ckpt_ext.open_checkpoint(fixture.run)
    assert_equals_truth(checkpoint, fixture.truth)
    assert checkpoint.optimizer.state().order_sources() == ["discovery by content"]


def test_the_order_is_the_stored_one_or_that_of_the_spec_that_wrote(flat_fixture: Fixture) -> None:
    checkpoint = mcore_ckpt_ext.open_checkpoint(flat_fixture.run)
    checkpoint.names("fp32_param")
    engine = flat_fixture.job["args"]["transformer_impl"] == "transformer_engine"
    spec = "the Transformer Engine layer spec" if engine else "the local layer spec"
    assert checkpoint.optimizer.state().order_sources() == [STORED_ORDER if checkpoint.format.name == "torch" else spec]


def test_a_region_is_read_alone() -> None:
    fixture = fixture_named("p02")
    name = "decoder.layers.2.mlp.linear_fc1.weight"
    checkpoint = mcore_ckpt_ext.open_checkpoint(fixture.iteration)
    values = checkpoint.tensor("exp_avg", name).read(Region(name, (3, 5), (40, 11)))
    assert torch.equal(values, fixture.truth[f"exp_avg.{name}"][3:43, 5:16])


def test_opening_reads_nothing_but_metadata(checkpoint_fixture: Fixture) -> None:
    checkpoint = mcore_ckpt_ext.open_checkpoint(checkpoint_fixture.run)
    assert checkpoint.job.layout.world and checkpoint.names("weight")
    data = [path for path in checkpoint_fixture.iteration.rglob("*") if path.suffix in (".distcp", ".pt")]
    assert checkpoint.files.reader.bytes_read < sum(path.stat().st_size for path in data) / 4


def test_the_sidecar_is_the_first_source_of_order(flat_fixture: Fixture, tmp_path: Path) -> None:
    fixture = flat_fixture.copy_to(tmp_path / "copy")
    sidecar = recorded_layout(fixture)
    assert Sidecar.from_json(sidecar.to_json()) == sidecar
    (fixture.iteration / "mcore_ckpt_ext.json").write_text(sidecar.to_json())
    checkpoint = mcore_ckpt_ext.open_checkpoint(fixture.run)
    assert_equals_truth(checkpoint, fixture.truth)
    assert checkpoint.optimizer.state().order_sources() == ["the sidecar"]


def test_a_wrong_sidecar_is_not_used(damaged: Fixture) -> None:
    """Two parameters of equal size exchanged in the sidecar: the content contradicts, and the next witness serves."""
    text = recorded_layout(damaged).to_json()
    first, second = '"decoder.layers.1.mlp.linear_fc1.weight"', '"decoder.layers.1.mlp.linear_fc2.weight"'
    text = text.replace(first, "<>").replace(second, first).replace("<>", second)
    (damaged.iteration / "mcore_ckpt_ext.json").write_text(text)
    checkpoint = mcore_ckpt_ext.open_checkpoint(damaged.run)
    assert_equals_truth(checkpoint, damaged.truth)
    assert checkpoint.optimizer.state().order_sources() == [
        "the local layer spec instead of the sidecar",
        "the sidecar",
    ]
    (told,) = checkpoint.format.notices(checkpoint)
    assert told.startswith("mcore_ckpt_ext.json is ignored: ") and "dp_group_idx_1" in told


EQUAL = [f"decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight" for layer in (2, 3)]


def exchanged(text: str) -> str:
    """A sidecar in which two parameters change places, whose weights are equal in every bit."""
    first, second = (json.dumps(name) for name in EQUAL)
    return text.replace(first, "<>").replace(second, first).replace("<>", second)


def named_twice(text: str) -> str:
    first, second = (json.dumps(name) for name in EQUAL)
    return text.replace(second, first)


def recorded_twice(text: str) -> str:
    content = json.loads(text)
    return json.dumps({**content, "groups": [*content["groups"], content["groups"][0]]})


def two_entries(text: str) -> str:
    return text.replace('"groups":', '"groups":[],"groups":')


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        (exchanged, "the local layer spec fits by itself and places parameters differently: decoder.layers.2.mlp"),
        (named_twice, f"names {EQUAL[0]} twice"),
        (recorded_twice, "records a group of"),
        (two_entries, "two entries 'groups'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_lying_sidecar_that_no_proof_sees(lie: Callable[[str], str], told: str, tmp_path: Path) -> None:
    """The masters of both round to the weight of either, so only their moments would be exchanged."""
    fixture = fixture_named("p48").copy_to(tmp_path / "p48")
    checkpoint = mcore_ckpt_ext.open_checkpoint(fixture.run)
    first, second = (checkpoint.tensor("weight", name).read() for name in EQUAL)
    assert torch.equal(first, second)
    place = fixture.iteration / "mcore_ckpt_ext.json"
    honest = recorded_layout(fixture).to_json()
    place.write_text(honest)
    assert mcore_ckpt_ext.open_checkpoint(fixture.run).format.notices(mcore_ckpt_ext.open_checkpoint(fixture.run)) == []
    place.write_text(lie(honest))
    checkpoint = mcore_ckpt_ext.open_checkpoint(fixture.run)
    for name in EQUAL:
        assert torch.equal(checkpoint.tensor("exp_avg", name).read().float(), fixture.truth[f"exp_avg.{name}"].float())
    assert any("is ignored" in note and told in note for note in checkpoint.format.notices(checkpoint))
    found = mcore_ckpt_ext.verify(fixture.run)
    assert found.sound
    assert any(finding.severity == "warning" and told in finding.what for finding in found.findings)


def test_a_sidecar_of_the_users_own_modules_is_used(tmp_path: Path) -> None:
    """Negative control: of a `--spec` no known layer spec knows more than what was recorded."""
    fixture = fixture_named("p48").copy_to(tmp_path / "p48")
    (fixture.iteration / "mcore_ckpt_ext.json").write_text(exchanged(recorded_layout(fixture).to_json()))
    checkpoint = mcore_ckpt_ext.open_checkpoint(fixture.run)
    checkpoint.job.common()["args"].spec = ["my_model", "layer_spec"]
    assert checkpoint.format.notices(checkpoint) == []
    assert checkpoint.optimizer.state().order_sources() == ["the sidecar"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 2}', '{"version": 1, "written_by": 3}', "null"])
def test_a_foreign_sidecar_is_ignored(damaged: Fixture, text: str) -> None:
    (damaged.iteration / "mcore_ckpt_ext.json").write_text(text)
    checkpoint = mcore_ckpt_ext.open_checkpoint(damaged.run)
    assert checkpoint.tensor("exp_avg", "embedding.word_embeddings.weight").read().shape == (128, 32)


def test_indistinguishable_parameters_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two biases with equal weights in one layer, no witness of their order: refused, naming the place."""
    from mcore_ckpt_ext.layout.buckets import BucketKey, OptimizerGroup
    from mcore_ckpt_ext.layout.local_model import ModelRank
    from mcore_ckpt_ext.layout.packing_search import _Assignment, _Spot

    key = BucketKey(0, "(torch.bfloat16, torch.float32)", 0)
    both = {
        f"decoder.layers.0.{name}.bias": (Region.whole(f"decoder.layers.0.{name}.bias", (8,)),) for name in ("a", "b")
    }
    spots = [_Spot(key, 0, dict(both)), _Spot(key, 64, dict(both))]
    with pytest.raises(PackingError, match="cannot distinguish parameters"):
        _Assignment(OptimizerGroup(0, 0, ModelRank(0, 0), range(1), {}), spots).solve()
