"""Tests damaged and hostile checkpoints offline: each causes a clear error, never a wrong number."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from mcore_ckpt_ext.errors import (
    CheckpointError,
    PackingError,
    ProofError,
    UnreadableCheckpointError,
    UnsupportedCheckpointError,
)
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM, WEIGHT
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.damage import MATRIX, flip, payload_position, read_all, verify_checksums


def test_a_byte_flipped_in_a_weight_is_seen_by_the_proof(damaged: Fixture) -> None:
    flip(*payload_position(open_checkpoint(damaged.run), WEIGHT, MATRIX, 700))
    with pytest.raises(ProofError, match=f"{MATRIX}, element 700"):
        open_checkpoint(damaged.run).tensor(FP32_PARAM, MATRIX).read()
    with pytest.raises(ProofError):
        open_checkpoint(damaged.run).tensor("exp_avg", MATRIX).read()


@pytest.mark.parametrize("byte", [2, 3])
def test_a_byte_flipped_in_the_leading_half_of_a_master_is_seen_by_the_proof(damaged: Fixture, byte: int) -> None:
    path, position = payload_position(open_checkpoint(damaged.run), FP32_PARAM, MATRIX, 700)
    flip(path, position + byte)
    with pytest.raises(ProofError, match=MATRIX):
        open_checkpoint(damaged.run).tensor(FP32_PARAM, MATRIX).read()


@pytest.mark.parametrize("kind", [WEIGHT, FP32_PARAM, "exp_avg", "exp_avg_sq"])
def test_checksums_see_any_byte(damaged: Fixture, kind: str) -> None:
    checkpoint = open_checkpoint(damaged.run)
    verify_checksums(checkpoint)
    flip(*payload_position(checkpoint, kind, MATRIX, 700), bit=1)
    with pytest.raises(UnreadableCheckpointError, match="checksum differs"):
        verify_checksums(open_checkpoint(damaged.run))


def test_a_sampled_flip_leaves_no_layout_at_all(damaged: Fixture) -> None:
    """The first elements of every parameter determine the layout; if they are damaged, no source is trusted."""
    flip(*payload_position(open_checkpoint(damaged.run), WEIGHT, MATRIX, 0))
    with pytest.raises(PackingError, match="no packing of the gradient buffers could be verified.*would be master"):
        open_checkpoint(damaged.run).names(FP32_PARAM)


def test_a_missing_file_is_named(damaged: Fixture) -> None:
    (damaged.iteration / "__2_0.distcp").unlink()
    with pytest.raises(UnreadableCheckpointError, match="__2_0.distcp.*use another iteration"):
        read_all(damaged.run)


@pytest.mark.parametrize("keep", [0, 1000, 0.5, 0.99])
def test_a_truncated_file_is_an_error(damaged: Fixture, keep: float) -> None:
    path = damaged.iteration / "__4_0.distcp"
    size = path.stat().st_size
    os.truncate(path, keep if keep > 1 else int(size * keep))
    with pytest.raises(UnreadableCheckpointError, match="shorter than its metadata says.*__4_0.distcp|__4_0"):
        read_all(damaged.run)


def test_the_metadata_of_another_checkpoint_is_an_error(damaged: Fixture) -> None:
    shutil.copy(fixture_named("p03").iteration / ".metadata", damaged.iteration / ".metadata")
    with pytest.raises(CheckpointError):
        read_all(damaged.run)


def test_weights_edited_after_the_save_are_refused(damaged: Fixture) -> None:
    """Set a whole matrix of weights to zero, as a pruning script would."""
    checkpoint = open_checkpoint(damaged.run)
    path, position = payload_position(checkpoint, WEIGHT, MATRIX, 0)
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes(2 * checkpoint.tensor(WEIGHT, MATRIX).logical.shape[0] * 32))
    with pytest.raises(CheckpointError, match=MATRIX):
        read_all(damaged.run)


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt"])
def test_an_unfinished_checkpoint_is_refused(damaged: Fixture, name: str) -> None:
    (damaged.iteration / name).unlink()
    with pytest.raises(UnreadableCheckpointError, match="use another iteration"):
        read_all(damaged.run)


def test_an_empty_index_is_refused_as_that(damaged: Fixture) -> None:
    """A full disk or a killed save leaves an empty index."""
    (damaged.iteration / ".metadata").write_bytes(b"")
    with pytest.raises(UnreadableCheckpointError, match="index is empty.*use another iteration"):
        open_checkpoint(damaged.run)


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt"])
def test_garbage_instead_of_metadata_is_refused(damaged: Fixture, name: str) -> None:
    (damaged.iteration / name).write_bytes(b"\x80\x04garbage" * 50)
    with pytest.raises(CheckpointError):
        read_all(damaged.run)


def test_another_backend_is_refused_by_name(damaged: Fixture) -> None:
    (damaged.iteration / "metadata.json").write_text('{"sharded_backend": "orbax", "sharded_backend_version": 1}')
    with pytest.raises(UnsupportedCheckpointError, match="orbax.*torch_dist or zarr"):
        open_checkpoint(damaged.run)


def test_a_path_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("garbage")
    with pytest.raises(UnreadableCheckpointError, match="names no iteration"):
        open_checkpoint(tmp_path)


def swap_masters(fixture: Fixture, first: str, second: str) -> None:
    """Exchange the masters of two parameters of equal shape on disk."""
    checkpoint = open_checkpoint(fixture.run)
    values = {name: checkpoint.tensor(FP32_PARAM, name).read().reshape(-1) for name in (first, second)}
    for name, other in ((first, second), (second, first)):
        begin = 0
        for stored in checkpoint.stored_slices(FP32_PARAM, name):
            payload = checkpoint.files.transfer.locate(stored.extent)
            part = values[other][begin : begin + stored.slice.numel]
            with (checkpoint.files.folder / payload.file).open("r+b") as file:
                file.seek(payload.offset + stored.first * 4)
                file.write(part.contiguous().view(torch.uint8).numpy().tobytes())
            begin += stored.slice.numel


LAYER = "decoder.layers"


@pytest.mark.parametrize(
    ("fixture_name", "first", "second"),
    [
        # between stages, between layers of one stage, between modules of one layer
        ("p01", f"{LAYER}.1.self_attention.linear_proj.weight", f"{LAYER}.2.self_attention.linear_proj.weight"),
        ("p02", f"{LAYER}.0.self_attention.linear_proj.weight", f"{LAYER}.1.self_attention.linear_proj.weight"),
        ("p12", f"{LAYER}.0.self_attention.linear_proj.bias", f"{LAYER}.0.mlp.linear_fc2.bias"),
    ],
)
def test_two_exchanged_parameters_are_refused(fixture_name: str, first: str, second: str, tmp_path: Path) -> None:
    """Two intact parameters of equal shape are exchanged; the search by content must not accept this either."""
    fixture = fixture_named(fixture_name).copy_to(tmp_path / "copy")
    swap_masters(fixture, first, second)
    with pytest.raises(CheckpointError, match="could be verified"):
        read_all(fixture.run)
