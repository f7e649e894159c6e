"""Test checkpoints whose index torch 2.9 to 2.11 wrote, without the attributes that Megatron adds to it."""

from __future__ import annotations

import pickle
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext import HuggingFace, Legacy, TorchDist
from mcore_ckpt_ext.errors import CheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.model_space.names import name_at, stacked_axes
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.conversion import convert
from mcore_ckpt_ext.operations.inspection import inspect
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.optimizers.natural_shapes import Shape, natural_shape
from tests.harness.checkpoints import Fixture, assert_is_the_truth, copied_by_torch, fixture_named, optimizer_alone

MLP = "decoder.layers.mlp.linear_fc1.weight"
EXPERTS = "decoder.layers.mlp.experts.experts.linear_fc1.weight"


@pytest.fixture
def lacking(tmp_path: Path) -> Fixture:
    copied = fixture_named("p05").copy_to(tmp_path / "copy")
    copied_by_torch(copied.iteration)
    return copied


def test_a_checkpoint_is_read_and_converted_by_the_shapes_of_its_weights(lacking: Fixture, tmp_path: Path) -> None:
    assert_is_the_truth(open_checkpoint(lacking.run), lacking)
    assert verify(lacking.run).sound
    for number, target in enumerate((TorchDist(), TorchDist(megatron_version="0.14"), Legacy())):
        convert(lacking.run, tmp_path / str(number), target)
        assert compare(lacking.run, tmp_path / str(number)).tensors_equal
    convert(lacking.run, tmp_path / "weights", HuggingFace())


def test_the_weights_may_be_in_another_folder(tmp_path: Path) -> None:
    folder = optimizer_alone("p05", tmp_path / "alone")
    copied_by_torch(folder)
    with pytest.raises(UnsupportedCheckpointError, match="--weights FOLDER"):
        convert(folder, tmp_path / "out", TorchDist())
    convert(fixture_named("p05").run, tmp_path / "weights", HuggingFace())
    assert compare(fixture_named("p05").run, folder, weights=tmp_path / "weights").tensors_equal


def test_a_weight_of_another_shape_is_refused(lacking: Fixture, tmp_path: Path) -> None:
    index = pickle.loads((lacking.iteration / ".metadata").read_bytes())
    for name, stored in index.state_dict_metadata.items():
        if name.endswith(f"fp32_param.{MLP}"):
            stored.size = torch.Size((4, 3, 1, 4096))
    (lacking.iteration / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=rf"lacks the natural shapes.*{MLP}.*--drop optimizer"):
        convert(lacking.run, tmp_path / "out", TorchDist())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["p05", "p01", "p10"])
def test_the_missing_plans_are_no_evidence_of_an_early_release(name: str, tmp_path: Path) -> None:
    copied = fixture_named(name).copy_to(tmp_path / "copy")
    before = inspect(copied.run)
    copied_by_torch(copied.iteration)
    found = inspect(copied.run)
    assert (found.writer.version, found.writer.first) == (before.writer.version, before.writer.first)
    stock = {item.versions for item in found.resumptions if item.who == "stock Megatron"}
    assert stock == ({"none"} if name == "p05" else {item.versions for item in before.resumptions[:1]})


@pytest.mark.parametrize(("key", "natural", "shards"), [
    ("embedding.word_embeddings.weight", (128, 32), (2, 1)),
    ("decoder.final_layernorm.weight", (32,), (1,)),
    (MLP, (4, 128, 32), (4, 2, 1)),
    ("decoder.layers.2.mlp.linear_fc2.weight", (32, 128), (1, 4)),
    (EXPERTS, (4, 8, 64, 32), (4, 8, 2, 1)),
    (EXPERTS, (4, 8, 64, 32), (4, 2, 1, 1)),  # four experts in one array
])  # fmt: skip
def test_the_shape_follows_from_the_weight_and_the_shards(key: str, natural: Shape, shards: Shape) -> None:
    names = weights_of(key, natural)
    local = prod(size // count for size, count in zip(natural, shards, strict=True))
    assert natural_shape(key, (*shards, local), names.get) == natural
    assert natural_shape(key, natural, names.get) is None


def weights_of(key: str, natural: Shape) -> dict[str, Shape]:
    stacked = stacked_axes(key)
    return {name_at(key, place): natural[stacked:] for place in product(*map(range, natural[:stacked]))}


@pytest.mark.parametrize(("stored", "natural"), [
    ((4, 3, 1, 2048), (4, 128, 32)),  # three shards of 128 rows
    ((4, 2, 1, 2047), (4, 128, 32)),  # a shard of too few elements
    ((8, 2, 1, 2048), (4, 128, 32)),  # more layers than the model has
    ((4, 0, 1, 2048), (4, 128, 32)),
    ((4, 2, 1, 1, 2048), (4, 128, 32)),  # of a weight with more axes
    ((2, 1), (4, 128, 32)),
])  # fmt: skip
def test_a_shape_that_does_not_fit_is_refused(stored: Shape, natural: Shape) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="fits no sharding"):
        natural_shape(MLP, stored, weights_of(MLP, natural).get)


def test_an_array_of_one_axis_is_never_reshaped() -> None:
    assert natural_shape("decoder.final_layernorm.weight", (32,), {}.get) is None
    with pytest.raises(UnsupportedCheckpointError, match="no weight.*--weights FOLDER"):
        natural_shape("decoder.final_layernorm.weight", (1, 32), {}.get)
