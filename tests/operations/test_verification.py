"""Test the verification of real checkpoints: intact ones are sound, damage is described and located."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UnreadableCheckpointError, UnsupportedCheckpointError
from mcore_ckpt_ext.formats.checkpoint import Checkpoint, open_checkpoint
from mcore_ckpt_ext.model_space.slices import Region, Slice
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, EXP_AVG_SQ, FP32_PARAM, WEIGHT, LogicalTensor
from mcore_ckpt_ext.operations import coverage
from mcore_ckpt_ext.operations.completeness import check_index
from mcore_ckpt_ext.operations.content import ContentCheck
from mcore_ckpt_ext.operations.coverage import check_tensor
from mcore_ckpt_ext.operations.findings import (
    CHECKSUMS,
    COMPLETE,
    COPIES,
    COVERED,
    MANIFEST,
    MASTERS,
    VALUES,
    Verification,
)
from mcore_ckpt_ext.operations.verification import verify
from mcore_ckpt_ext.optimizers.flat_arrays import FlatArray, FlatPiece
from mcore_ckpt_ext.planning.array_location import ArchivedTensor
from mcore_ckpt_ext.planning.plan import Copies, StoredSlice
from mcore_ckpt_ext.planning.source_view import SourceView
from mcore_ckpt_ext.storage.dcp_index import METADATA_FILE
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.damage import MATRIX, flip, payload_position, wrong_masters

EMBEDDINGS = "embedding.word_embeddings.weight"
NORM = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"


def findings(result: Verification, check: str | None = None) -> list[str]:
    """Severity, place and text of what one check found."""
    return [f"{f.severity} {f.where}: {f.what}" for f in result.findings if check in (None, f.check)]


def of_copy(checkpoint: Checkpoint, kind: str, name: str, copy: int) -> tuple[Path, int]:
    """File and byte of the first element of one of the copies of a tensor's first part."""
    stored = checkpoint.copies(kind, name)[0][copy][0]
    payload = checkpoint.files.transfer.locate(stored.extent)
    return checkpoint.files.folder / payload.file, payload.offset + stored.first * payload.dtype.itemsize


def put(path: Path, position: int, *values: float) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(struct.pack(f"<{len(values)}f", *values))


def test_intact_checkpoints_are_sound(checkpoint_fixture: Fixture) -> None:
    result = verify(checkpoint_fixture.run)
    assert result.sound
    assert findings(result) == []
    parameters = sum(t.numel() for key, t in checkpoint_fixture.truth.items() if key.startswith(FP32_PARAM))
    (proof,) = (check for check in result.checks if check.name == MASTERS)
    assert proof.extent.startswith(f"{parameters:,} masters")
    assert COMPLETE in {check.name for check in result.checks}
    assert verify(checkpoint_fixture.run, quick=True).sound


@pytest.mark.parametrize("target", [None, mcore_ckpt_ext.Legacy(), mcore_ckpt_ext.Canonical()])
def test_fp32_weights_are_not_compared_with_themselves(
    target: mcore_ckpt_ext.targets.Target | None, tmp_path: Path
) -> None:
    """An optimizer of fp32 weights has no other masters, so a changed weight would pass."""
    run = fixture_named("p42").run
    if target is not None:
        run = mcore_ckpt_ext.convert(run, tmp_path / "out", target).destination
    (extent,) = (check.extent for check in verify(run).checks if check.name == MASTERS)
    assert extent.startswith("45,344 masters that are fp32 weights")


def test_shifted_masters_are_named_tensor_by_tensor(corrupted_fixture: Fixture) -> None:
    result = verify(corrupted_fixture.run)
    assert not result.sound
    assert {finding.where for finding in result.findings} == wrong_masters(corrupted_fixture)
    assert all("wrote it shifted" in finding.what and finding.check == MASTERS for finding in result.findings)


def test_the_count_of_lost_elements_is_that_of_an_independent_simulation() -> None:
    fixture = fixture_named("p23")
    (finding,) = verify(fixture.run).findings
    (counts,) = fixture.job["corruption"]["per_param"].values()
    assert f"{sum(last - first for first, last in counts['lost_ranges'])} are lost" in finding.what


def test_without_a_repair_the_proof_itself_names_them(
    corrupted_fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the writer's buffers could not be told: what stands in the slots does not round to the weights."""
    monkeypatch.setattr("mcore_ckpt_ext.optimizers.model_space_formats.repair", lambda written, *_: written)
    result = verify(corrupted_fixture.run)
    named = {f.where.removeprefix("fp32_param ") for f in result.findings if f.check == MASTERS}
    assert named == wrong_masters(corrupted_fixture)


# What a user's disk does ---------------------------------------------------------------------------------------------


def test_damage_in_the_part_of_the_index_that_only_megatron_reads_is_named(damaged: Fixture) -> None:
    path = damaged.iteration / METADATA_FILE
    data = path.read_bytes()
    path.write_bytes(data[:-200] + b"\xff" + data[-199:])
    assert open_checkpoint(damaged.run).files.index().has_plans, "this package resumes from the rest"
    (finding,) = findings(verify(damaged.run))
    assert finding.startswith(f"error {path}: the ranks' plans at its end cannot be read")


@pytest.mark.parametrize("kind", [WEIGHT, FP32_PARAM, EXP_AVG, EXP_AVG_SQ])
def test_a_flipped_byte_is_named(damaged: Fixture, kind: str) -> None:
    path, position = payload_position(open_checkpoint(damaged.run), kind, MATRIX, 700)
    flip(path, position + (0 if kind == WEIGHT else 3))
    result = verify(damaged.run)
    assert not result.sound
    (checksum,) = findings(result, CHECKSUMS)
    key = "decoder.layers.mlp.linear_fc1.weight" if kind == WEIGHT else "dp_group_idx_1.gbuf_idx_0"
    assert key in checksum
    assert path.name in checksum
    proof = findings(result, MASTERS)
    if kind in (WEIGHT, FP32_PARAM):
        assert len(proof) == 1
        assert proof[0].startswith(f"error fp32_param {MATRIX}: 1 master does not round to its weight")
        assert proof[0].endswith("at (21, 28)")
    else:
        assert proof == [], "no proof reaches a moment; its checksum does"


def test_a_flipped_byte_in_a_pickle_is_named(damaged: Fixture) -> None:
    checkpoint = open_checkpoint(damaged.run)
    place = next(stored for key, stored in checkpoint.files.index().objects.items() if key.startswith("rng_state"))
    path = damaged.iteration / place.file
    position = path.read_bytes().index(b"data.pkl", place.offset) + 200
    flip(path, position)
    (checksum,) = findings(verify(damaged.run), CHECKSUMS)
    assert "rng_state" in checksum


def test_a_damaged_sample_leaves_no_layout_and_the_rank_is_named(damaged: Fixture) -> None:
    flip(*payload_position(open_checkpoint(damaged.run), WEIGHT, MATRIX, 0))
    result = verify(damaged.run)
    assert findings(result, CHECKSUMS)
    (proof,) = (finding for finding in findings(result, MASTERS) if "no packing" in finding)
    assert "pipeline rank 1" in proof
    assert MATRIX in proof


def test_every_rank_whose_layout_is_gone_is_named(damaged: Fixture) -> None:
    checkpoint = open_checkpoint(damaged.run)
    for name in (MATRIX, MATRIX.replace("layers.1", "layers.3")):
        flip(*payload_position(checkpoint, WEIGHT, name, 0))
    told = findings(verify(damaged.run), MASTERS)
    assert ["pipeline rank 1" in told[0], "pipeline rank 3" in told[1]] == [True, True]


def missing(name: str) -> Callable[[Fixture], None]:
    return lambda fixture: (fixture.iteration / name).unlink()


def cut_short(fixture: Fixture) -> None:
    path = fixture.iteration / "__4_0.distcp"
    os.truncate(path, path.stat().st_size // 2)


def exchanged(fixture: Fixture) -> None:
    one, other = (fixture.iteration / name for name in ("__2_0.distcp", "__4_1.distcp"))
    aside = fixture.iteration / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def scribbled(name: str) -> Callable[[Fixture], None]:
    def scribble(fixture: Fixture) -> None:
        (fixture.iteration / name).write_bytes(b"\x80\x04nothing of the kind")

    return scribble


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (missing("metadata.json"), "metadata.json: missing: Megatron writes it last"),
        (missing(".metadata"), ".metadata: missing: without this index"),
        (missing("common.pt"), "has no common state"),
        (missing("__2_0.distcp"), "__2_0.distcp: missing; it held "),
        (cut_short, "__4_0.distcp: 33,595 bytes, but its records need 67,191"),
        (scribbled(".metadata"), "damaged"),
        (scribbled("metadata.json"), "metadata.json is damaged"),
        (scribbled("common.pt"), "not a torch archive"),
    ],
)
def test_incomplete_checkpoints(
    damaged: Fixture, damage: Callable[[Fixture], None], expected: str, quick: bool
) -> None:
    damage(damaged)
    result = verify(damaged.run, quick=quick)
    assert not result.sound
    assert any(expected in finding and finding.startswith("error") for finding in findings(result, COMPLETE)), findings(
        result
    )


def test_a_missing_file_says_what_was_in_it_and_the_rest_is_still_checked(damaged: Fixture) -> None:
    """Rank 6's second file is gone; a flip elsewhere is found all the same."""
    flip(*payload_position(open_checkpoint(damaged.run), WEIGHT, MATRIX, 700))
    (damaged.iteration / "__7_1.distcp").unlink()
    result = verify(damaged.run)
    (gone,) = findings(result, COMPLETE)
    assert "optimizer.distributed.dp_group_idx_3" in gone
    assert findings(result, CHECKSUMS)
    assert [check.extent for check in result.checks if not check.done] == [
        "files of the optimizer's state are missing or cut off",
        "no master was compared with its weight",
    ]


def test_a_missing_file_is_one_finding_and_not_one_a_tensor(damaged: Fixture) -> None:
    (damaged.iteration / "__2_0.distcp").unlink()
    assert len(findings(verify(damaged.run))) == 1


@pytest.mark.parametrize("quick", [True, False])
def test_a_link_that_leads_elsewhere_is_a_finding(damaged: Fixture, tmp_path: Path, quick: bool) -> None:
    file = damaged.iteration / "__2_0.distcp"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    (finding,) = findings(verify(damaged.run, quick=quick))
    assert "a link leads out of the folder" in finding


def test_exchanged_files_are_seen(damaged: Fixture) -> None:
    exchanged(damaged)
    assert not verify(damaged.run).sound


@pytest.mark.parametrize("content", [(COMPLETE, "exists"), (COMPLETE, "gone")])
def test_a_tracker_ahead_of_its_folders(damaged: Fixture, content: tuple[str, str]) -> None:
    (damaged.run / "latest_checkpointed_iteration.txt").write_text("12")
    if content[1] == "gone":
        shutil.rmtree(damaged.iteration)
    result = verify(damaged.run)
    (finding,) = findings(result, COMPLETE)
    assert "it names iter_0000012, which does not exist" in finding
    assert not result.sound


def test_iterations_without_a_tracker(damaged: Fixture) -> None:
    (damaged.run / "latest_checkpointed_iteration.txt").unlink()
    result = verify(damaged.run)
    assert not result.sound
    assert "no save has finished" in findings(result, COMPLETE)[0]
    assert result.path.endswith("iter_0000004")
    assert any(check.name == MASTERS and check.done for check in result.checks), "the newest is looked at all the same"


def test_an_unfinished_asynchronous_save_next_to_a_finished_one(damaged: Fixture) -> None:
    """Its tensors are written, its metadata and the tracker are not: a warning of the run, an error of its own."""
    unfinished = damaged.run / "iter_0000008"
    shutil.copytree(damaged.iteration, unfinished)
    (unfinished / METADATA_FILE).unlink()
    (unfinished / "metadata.json").unlink()
    result = verify(damaged.run)
    assert result.sound
    assert "a save did not finish, or this file was edited; verify iter_0000008" in findings(result, COMPLETE)[0]
    result = verify(unfinished)
    assert not result.sound
    told = "\n".join(findings(result, COMPLETE))
    assert "metadata.json: missing" in told
    assert ".metadata: missing" in told
    assert "it names iteration 4: this save was not finished" in told


def test_an_empty_iteration_folder(damaged: Fixture) -> None:
    shutil.rmtree(damaged.iteration)
    damaged.iteration.mkdir()
    result = verify(damaged.run)
    assert "contains no file of a checkpoint" in findings(result)[0]
    assert not result.sound


def test_other_folders_are_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpointError, match="no such folder"):
        verify(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnreadableCheckpointError, match="no checkpoint"):
        verify(tmp_path)


def test_an_unread_backend_is_unsupported(damaged: Fixture) -> None:
    (damaged.iteration / "metadata.json").write_text('{"sharded_backend": "tensorstore"}')
    with pytest.raises(UnsupportedCheckpointError, match="tensorstore"):
        verify(damaged.run)


@pytest.mark.parametrize(("name", "other"), [("p04", "p08b"), ("p08b", "p50")])
def test_data_of_another_format_are_named(name: str, other: str, tmp_path: Path) -> None:
    """Of a job that saved the iteration in another format before: Megatron reads one of them."""
    fixture = fixture_named(name).copy_to(tmp_path / "copy")
    shutil.copytree(
        fixture_named(other).iteration, fixture.iteration, dirs_exist_ok=True,
        ignore=lambda folder, names: {name for name in names if (fixture.iteration / name).exists()},
    )  # fmt: skip
    for quick in (False, True):
        result = verify(fixture.run, quick=quick)
        (told,) = (finding for finding in result.findings if "another format" in finding.what)
        assert (result.sound, told.severity, told.check) == (True, "warning", COMPLETE)
        assert ("mp_rank_00_000/distrib_optim.pt" if other == "p08b" else "__0_0.distcp") in told.what


def test_an_unknown_file_is_highlighted(damaged: Fixture) -> None:
    (damaged.iteration / "__99_0.distcp").write_bytes(b"left over")
    result = verify(damaged.run, quick=True)
    assert result.sound
    assert findings(result) == [f"warning {damaged.iteration}: files that are not in the index: __99_0.distcp"]


# Legacy folders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "check", "expected"),
    [
        ("mp_rank_01_001", COMPLETE, "does not have the rank folders of its own layout"),
        ("mp_rank_01_001/model_optim_rng.pt", COMPLETE, "mp_rank_01_001/model_optim_rng.pt"),
        (
            "mp_rank_01_001/distrib_optim.pt",
            COVERED,
            "tensor rank 1, pipeline rank 1: its optimizer state is missing",
        ),
    ],
)
def test_an_incomplete_legacy_checkpoint(tmp_path: Path, name: str, check: str, expected: str) -> None:
    fixture = fixture_named("p08").copy_to(tmp_path / "p08")
    path = fixture.iteration / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    result = verify(fixture.run)
    assert not result.sound
    assert any(expected in finding for finding in findings(result, check)), findings(result)


@pytest.mark.parametrize("cut", [False, True])
def test_a_zarr_chunk_that_is_gone_or_cut_short(tmp_path: Path, cut: bool) -> None:
    fixture = fixture_named("p31").copy_to(tmp_path / "p31")
    path = fixture.iteration / "embedding.word_embeddings.weight" / "0.0"
    os.truncate(path, 10) if cut else path.unlink()
    (finding,) = findings(verify(fixture.run), COMPLETE)
    assert "embedding.word_embeddings.weight" in finding


@pytest.mark.parametrize(
    ("name", "shards"), [("p31", "rng_state has 1 shard of 2"), ("p33", "rng_state has 3 shards of 4")]
)
def test_a_shard_of_an_object_that_is_gone(name: str, shards: str, tmp_path: Path) -> None:
    """Zarr has no index of its objects, but each name says how many there are, except in random states of 0.7."""
    fixture = fixture_named(name).copy_to(tmp_path / name)
    max(fixture.iteration.glob("rng_state/shard_*")).unlink()
    (finding,) = findings(verify(fixture.run, quick=True), COMPLETE)
    assert shards in finding


def test_a_legacy_file_cut_short(tmp_path: Path) -> None:
    fixture = fixture_named("p08").copy_to(tmp_path / "p08")
    path = fixture.iteration / "mp_rank_00_001/distrib_optim.pt"
    os.truncate(path, path.stat().st_size - 100)
    assert "mp_rank_00_001/distrib_optim.pt" in "\n".join(findings(verify(fixture.run)))


# Copies, values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "tensor"),
    [("p01", EXP_AVG, EMBEDDINGS), ("p06", EXP_AVG_SQ, EMBEDDINGS), ("p02", EXP_AVG, NORM), ("p21", EXP_AVG_SQ, NORM),
     ("p08", WEIGHT, NORM), ("p08", EXP_AVG, EMBEDDINGS), ("p08c", EXP_AVG, NORM)],
)  # fmt: skip
def test_copies_that_differ_are_named(tmp_path: Path, name: str, kind: str, tensor: str) -> None:
    """Tied embeddings, and what tensor-parallel ranks hold alike."""
    fixture = fixture_named(name).copy_to(tmp_path / name)
    path, position = of_copy(open_checkpoint(fixture.run), kind, tensor, copy=1)
    flip(path, position, bit=1)
    result = verify(fixture.run)
    (finding,) = findings(result, COPIES)
    assert finding.startswith(f"error {kind} {tensor}: copy 1 differs from the first in 1 element")
    assert str(path.relative_to(fixture.iteration)) in finding


def test_values_that_no_training_leaves_are_counted(damaged: Fixture) -> None:
    checkpoint = open_checkpoint(damaged.run)
    nan, infinite = float("nan"), float("-inf")
    put(*payload_position(checkpoint, EXP_AVG, MATRIX, 10), nan, nan, infinite)
    put(*payload_position(checkpoint, EXP_AVG_SQ, MATRIX, 10), -1.0)
    result = verify(damaged.run)
    assert sorted(findings(result, VALUES)) == [
        f"warning exp_avg {MATRIX}: 2 elements are NaN, 1 element is infinite",
        f"warning exp_avg_sq {MATRIX}: 1 element is negative",
    ]


# Megatron's manifest -------------------------------------------------------------------------------------------------


def test_megatrons_own_manifest(damaged: Fixture) -> None:
    """Written by the genuine function, read by ours."""
    validation = pytest.importorskip("megatron.core.dist_checkpointing.validation")
    validation.save_integrity_manifest(str(damaged.iteration))
    result = verify(damaged.run)
    assert result.sound
    assert any(check.name == MANIFEST for check in result.checks)
    path, position = payload_position(open_checkpoint(damaged.run), EXP_AVG, MATRIX, 10)
    flip(path, position)
    (damaged.iteration / "__5_0.distcp").unlink()
    told = findings(verify(damaged.run), MANIFEST)
    assert len(told) == 2
    assert any(f"{path.name}: its SHA-256 is" in finding for finding in told)
    assert any("__5_0.distcp: missing or unreadable" in finding for finding in told)


@pytest.mark.parametrize("name", ["p04", "p31"])
def test_a_manifest_of_some_files_claims_no_others(name: str, tmp_path: Path) -> None:
    """Megatron lists no files in subfolders, where arrays of zarr lie, and misses none that a list lacks."""
    fixture = fixture_named(name).copy_to(tmp_path / "copy")
    digest = hashlib.sha256((fixture.iteration / "common.pt").read_bytes()).hexdigest()
    (fixture.iteration / "integrity.json").write_text(json.dumps({"files": {"common.pt": digest}}))
    result = verify(fixture.run)
    (told,) = findings(result, MANIFEST)
    assert "does not list" in told
    assert ".metadata" in told or ".zarray" in told
    (extent,) = (check.extent for check in result.checks if check.name == MANIFEST)
    assert extent == f"SHA-256 of 1 file, {(fixture.iteration / 'common.pt').stat().st_size:,} bytes"
    without = [check.extent for check in result.checks if check.name == CHECKSUMS and not check.done]
    assert [extent.partition(" bytes ")[2].partition(":")[0] for extent in without] == (
        [] if name == "p04" else ["of tensors have no checksums"]
    )


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        ("{", "it cannot be read"),
        ('{"files": 3}', "it cannot be read"),
        ('{"algorithm": "md5", "files": {}}', "it uses 'md5'"),
        (json.dumps({"algorithm": "sha256", "files": {"../../secret": "0"}}), "outside of the folder"),
    ],
)
def test_a_manifest_that_makes_no_sense(damaged: Fixture, manifest: str, expected: str) -> None:
    (damaged.iteration / "integrity.json").write_text(manifest)
    finding, *_ = findings(verify(damaged.run))
    assert expected in finding


# Every element once: metadata that contradict themselves --------------------------------------------------------------


def stored(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], file: str = "f") -> StoredSlice:
    region = Region(name, offsets, sizes)
    return StoredSlice(Slice.whole((region,)), ArchivedTensor(file, 0, 0, "float32", region.sizes), 0)


def two_regions(name: str, first: tuple[int, ...], second: tuple[int, ...], sizes: tuple[int, ...]) -> StoredSlice:
    whole = Slice.whole((Region(name, first, sizes), Region(name, second, sizes)))
    return StoredSlice(whole, ArchivedTensor("f", 0, 0, "float32", (whole.numel,)), 0)


TENSOR = LogicalTensor("x", (4, 6), "float32")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([[[stored("x", (0, 0), (4, 6))]]], []),
        ([[[stored("x", (1, 0), (3, 6)), stored("x", (0, 0), (1, 6))]]], []),
        ([[[stored("x", (1, 0), (3, 6)), stored("x", (0, 0), (2, 6))]]], ["6 elements are stored more than once"]),
        ([[[stored("x", (0, 0), (2, 6)), stored("x", (3, 0), (1, 6))]]],
         ["6 of 24 elements are not stored anywhere; the first is 12"]),
        ([[[stored("x", (0, 0), (3, 6))]]], ["6 of 24 elements are not stored anywhere; the first is 18"]),
        ([[[stored("x", (0, 0), (2, 6)), stored("x", (2, 0), (3, 6))]]], ["a part lies outside of its shape"]),
        ([[[stored("x", (0, 0), (4, 6))._replace(slice=Slice((Region("x", (0, 0), (4, 6)),), 6, 24))]]],
         ["6 of 24 elements are not stored anywhere; the first is 0"]),
        ([[[stored("x", (0,), (24,))]]], ["a part lies outside of its shape"]),
        ([[[stored("x", (), ())]]], ["a part lies outside of its shape"]),
        ([[[stored("x", (0, 0), (4, 3)), stored("x", (0, 3), (4, 3))]]], []),
        ([[[stored("x", (row, column), (2, 3)) for row in (0, 2) for column in (3, 0)]]], []),
        ([[[stored("x", (row, column), (2, 3)) for row, column in ((0, 0), (0, 3), (2, 3), (0, 0))]]],
         ["6 of 24 elements are not stored anywhere; the first is 12", "6 elements are stored more than once"]),
        ([[[stored("x", (0, 0), (4, 2)), stored("x", (0, 3), (4, 3))]]],
         ["4 of 24 elements are not stored anywhere; the first is 2"]),
        ([[[stored("x", (0, 0), (5, 6)), stored("x", (5, 0), (-1, 6))]]], ["a part lies outside of its shape"]),
        ([[[stored("x", (0, 0), (4, 6)), two_regions("x", (0, 0), (2, 0), (1, 6))]]],
         ["12 elements are stored more than once"]),
        ([[[]]], ["24 of 24 elements are not stored anywhere; the first is 0"]),
        ([[[stored("x", (0, 0), (4, 3))], [stored("x", (0, 0), (4, 3))]], [[stored("x", (0, 3), (4, 3))]]], []),
        ([[[stored("x", (0, 0), (4, 3))]]], ["12 of 24 elements are not stored anywhere; the first is 3"]),
        ([[[stored("x", (0, 0), (4, 4)), stored("x", (0, 3), (4, 3))]]], ["4 elements are stored more than once"]),
        ([[[stored("x", (0, 0), (2, 6)), stored("x", (0, 0), (2, 6))]]],
         ["12 of 24 elements are not stored anywhere; the first is 12", "12 elements are stored more than once"]),
        ([[[stored("x", (0, 0), (4, 7))]]], ["a part lies outside of its shape"]),
        ([[[stored("x", (-1, 0), (4, 6))]]], ["a part lies outside of its shape"]),
        ([[[stored("x", (0, 0), (4, 6))], [stored("x", (0, 0), (4, 5))]]], ["its copies hold different numbers"]),
    ],
)  # fmt: skip
def test_every_element_once(parts: Copies, expected: list[str]) -> None:
    found = [finding.what for finding in check_tensor(TENSOR, WEIGHT, parts)]
    assert len(found) == len(expected)
    assert all(text in what for text, what in zip(expected, found, strict=True)), found


@st.composite
def almost_grids(draw: st.DrawFn) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the cells of a grid in (4, 6), in any order; some moved, some left out, some twice."""
    axes = []
    for end in TENSOR.shape:
        borders = sorted({0, end, *draw(st.lists(st.integers(0, end), max_size=2))})
        axes.append([(low, high - low) for low, high in itertools.pairwise(borders)])
    cells = [(offsets, sizes) for offsets, sizes in (zip(*cell, strict=True) for cell in itertools.product(*axes))]
    cells = draw(st.permutations(cells))
    for number in draw(st.lists(st.integers(0, len(cells) - 1), max_size=2)):
        (row, column), sizes = cells[number]
        other = draw(st.sampled_from([(row, column), (row + 1, column), (row, max(0, column - 1)), (0, 0)]))
        cells[number] = (other, sizes if draw(st.booleans()) else (sizes[0], sizes[1] + 1))
    return cells[: draw(st.integers(len(cells) - 1, len(cells)))] + draw(st.sampled_from([[], cells[:1]]))


@given(almost_grids())
def test_slices_must_hold_every_element_once(
    cells: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    times = numpy.zeros((12, 16), int)
    for (row, column), (rows, columns) in cells:
        times[row : row + rows, column : column + columns] += 1
    inside = times[:4, :6]
    passes = not list(check_tensor(TENSOR, WEIGHT, [[[stored("x", *cell) for cell in cells]]]))
    assert passes == (bool((inside == 1).all()) and times.sum() == inside.sum())


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [([(0, 5), (5, 9)], []), ([(5, 9), (0, 5)], []), ([(0, 5), (6, 9)], ["1 of 9 elements is not stored anywhere"]),
     ([(0, 5), (4, 9)], ["1 element is stored more than once"]),
     ([(0, 8)], ["1 of 9 elements is not stored anywhere"]),
     ([(0, 9), (2, 4)], ["2 elements are stored more than once"])],
)  # fmt: skip
def test_flat_arrays_hold_every_element_once(intervals: list[tuple[int, int]], expected: list[str]) -> None:
    extent = ArchivedTensor("f", 0, 0, "float32", (9,))
    array = FlatArray(9, "float32", tuple(FlatPiece(low, high, extent, 0) for low, high in intervals))
    assert [finding.what for finding in coverage.check_flat("a", array)] == expected


def test_chunks_taken_out_of_the_index_are_missed(damaged: Fixture) -> None:
    """A real index that lacks one chunk of a weight, and one of a bucket."""
    checkpoint = open_checkpoint(damaged.run)
    arrays = dict(checkpoint.files.index().arrays)
    bucket = next(key for key in arrays if key.endswith("exp_avg"))
    for key in ("decoder.layers.mlp.linear_fc1.weight", bucket):
        arrays[key] = replace(arrays[key], chunks=arrays[key].chunks[1:])
    checkpoint.format.reader.index = replace(checkpoint.files.index(), arrays=arrays)  # type: ignore[attr-defined]
    (weight,) = coverage.check_kind(checkpoint, WEIGHT)
    assert (weight.check, weight.where) == (COVERED, "weight decoder.layers.0.mlp.linear_fc1.weight")
    (flat,) = coverage.check_arrays(checkpoint.optimizer.state())
    assert "dp_group_idx_0" in flat.where


def test_records_that_overlap_are_seen(damaged: Fixture) -> None:
    checkpoint = open_checkpoint(damaged.run)
    index, reader = checkpoint.files.index(), checkpoint.files.reader
    assert check_index(reader, index)[:2] == ([], set())
    key, place = next((k, place) for k, place in index.objects.items() if place.offset > 0)
    objects = {**index.objects, key: place._replace(offset=place.offset - 1)}
    findings_, failed, _ = check_index(reader, replace(index, objects=objects))
    assert failed == {place.file}
    assert "overlap at byte" in findings_[0].what


def test_kinds_of_different_shape_are_reported(damaged: Fixture) -> None:
    checkpoint = open_checkpoint(damaged.run)
    content = ContentCheck(checkpoint, True, set())
    of_another_shape = replace(
        SourceView.of(checkpoint.optimizer.state()),
        logical_tensor=lambda kind, name: LogicalTensor(name, (1, 2), "float32"),
    )
    content._sources[EXP_AVG] = of_another_shape
    report = content.check(MATRIX)
    assert "its kinds differ in shape" in report.findings[0].what


def test_an_optimizer_that_the_common_state_does_not_name(tmp_path: Path) -> None:
    """Its keys show it; but without parameter groups nothing resumes it."""
    target = fixture_named("p04").copy_to(tmp_path / "p04")
    common = torch.load(target.iteration / "common.pt", weights_only=False)
    for key in ("optimizer", "content_metadata"):
        common.pop(key, None)
    torch.save(common, target.iteration / "common.pt")
    result = verify(target.run)
    assert ["no parameter groups" in finding for finding in findings(result)] == [True]
    assert any(check.name == MASTERS and check.done for check in result.checks)


def test_a_checkpoint_without_optimizer(tmp_path: Path) -> None:
    """As `--no-save-optim` leaves it."""
    mcore_ckpt_ext.convert(fixture_named("p04").run, tmp_path / "o", mcore_ckpt_ext.TorchDist(), drop=["optimizer"])
    result = verify(tmp_path / "o")
    assert result.sound
    assert "it has no supported optimizer state" in findings(result, COVERED)[0]
    assert not any(check.name == MASTERS and check.done for check in result.checks)


def test_a_canonical_folder_is_verified(tmp_path: Path) -> None:
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "c", mcore_ckpt_ext.Canonical())
    assert verify(tmp_path / "c").sound
    checkpoint = open_checkpoint(tmp_path / "c")
    name = checkpoint.names(WEIGHT)[0]
    flip(*payload_position(checkpoint, WEIGHT, name, 3))
    result = verify(tmp_path / "c")
    assert f"fp32_param {name}" in findings(result, MASTERS)[0]


def test_progress_counts_up_to_the_end(damaged: Fixture) -> None:
    seen: list[tuple[int, int]] = []
    verify(damaged.run, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_progress_counts_what_is_read_once(damaged: Fixture) -> None:
    """Checksums of parameters are compared while these are read, so that no second pass is part of the estimate."""
    seen: list[tuple[int, int]] = []
    verify(damaged.run, progress=lambda done, total: seen.append((done, total)))
    stored = sum(path.stat().st_size for path in damaged.run.rglob("*.distcp"))
    assert seen[-1][1] < 1.1 * stored
    assert seen[-2][0] > 0.7 * seen[-1][1]  # the headers of archives are a large part of a toy


@pytest.mark.parametrize("target", [mcore_ckpt_ext.Legacy(), mcore_ckpt_ext.TorchDist(), mcore_ckpt_ext.Canonical()])
def test_no_check_is_done_that_looked_at_nothing(target: mcore_ckpt_ext.Legacy, tmp_path: Path) -> None:
    """The small files that have digests of their own are absent from a legacy checkpoint."""
    mcore_ckpt_ext.convert(fixture_named("p02").run, tmp_path / "out", target)
    extents = [check.extent for check in verify(tmp_path / "out").checks if check.done]
    assert extents
    assert not [extent for extent in extents if re.search(r"\b0 \w", extent)]
