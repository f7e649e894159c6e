"""Test the comparison in model space: five formats of one state are equal, and each difference is reported."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mcore_ckpt_ext
from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, FP32_PARAM, KINDS, WEIGHT
from mcore_ckpt_ext.operations import reading
from mcore_ckpt_ext.operations.comparison import compare
from mcore_ckpt_ext.operations.comparison_result import Comparison, PaddingRows, TensorDifference
from tests.harness.checkpoints import Fixture, fixture_named
from tests.harness.damage import MATRIX, flip, payload_position

ONE_STATE = ("p01", "p04", "p05", "p06", "p08b")
EMBEDDINGS = "embedding.word_embeddings.weight"
BESIDE = ("account_a", "account_b", "missed", "differing_copies_a", "differing_copies_b")


def only_difference(found: Comparison) -> TensorDifference:
    assert not found.equal
    (tensor,) = (tensor for kind in found.kinds for tensor in kind.different)
    return tensor


@pytest.mark.parametrize(("a", "b"), [*pairwise(ONE_STATE), (ONE_STATE[-1], ONE_STATE[0])])
def test_one_state_in_five_formats_and_three_versions(a: str, b: str) -> None:
    found = compare(fixture_named(a).run, fixture_named(b).run)
    assert found.equal
    assert [(kind.kind, kind.compared, kind.elements) for kind in found.kinds if kind.equal] == [
        (kind.kind, 52, 56_000) for kind in found.kinds
    ]
    assert {kind.kind for kind in found.kinds} == set(KINDS)
    assert {fact.what: fact.a == fact.b for fact in found.facts} == {
        "format": False, "layout": True, "iteration": True, "step": True, "lr": True,
    }  # fmt: skip


@pytest.fixture
def canonical(tmp_path: Path) -> Path:
    """p07 as a canonical folder, to rewrite with safetensors."""
    mcore_ckpt_ext.convert(fixture_named("p07").run, tmp_path / "c", mcore_ckpt_ext.Canonical())
    return tmp_path / "c"


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace tensors of a canonical folder by means of the safetensors library."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    kept = {key: tensor for key, tensor in load_file(file).items() if key != "checksums"}
    save_file({**kept, **tensors}, file, about)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(tensors, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_checkpoint_equals_the_truth_of_its_live_job(canonical: Path) -> None:
    fixture = fixture_named("p07")
    rewrite(canonical, fixture.truth)
    assert compare(fixture.run, canonical).equal
    changed = {f"exp_avg.{MATRIX}": fixture.truth[f"exp_avg.{MATRIX}"] + 1}
    rewrite(canonical, changed)
    found = only_difference(compare(fixture.run, canonical))
    assert (found.kind, found.name, found.different) == ("exp_avg", MATRIX, 4096)


@pytest.mark.parametrize("kind", KINDS)
def test_one_bit_is_one_difference(damaged: Fixture, kind: str) -> None:
    checkpoint = open_checkpoint(damaged.run)
    path, position = payload_position(checkpoint, kind, MATRIX, 700)
    before = float(checkpoint.files.transfer and fixture_named("p01").truth[f"{kind}.{MATRIX}"].flatten()[700])
    flip(path, position, bit=1)
    found = only_difference(compare(damaged.run, fixture_named("p08b").run))
    assert (found.kind, found.name, found.different, found.elements) == (kind, MATRIX, 1, 4096)
    assert found.first is not None
    index, a, b = found.first
    assert index == (21, 28)
    assert float(b) == before
    assert found.largest == abs(float(a) - float(b)) > 0


def test_blocks_count_alike(damaged: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference far into a tensor that is read in many blocks."""
    monkeypatch.setattr(reading, "BLOCK_ELEMENTS", 100)
    path, position = payload_position(open_checkpoint(damaged.run), EXP_AVG, MATRIX, 150)
    flip(path, position, bit=1)
    flip(path, position + 4 * 500, bit=1)
    found = only_difference(compare(damaged.run, fixture_named("p04").run))
    assert (found.different, found.first and found.first[0]) == (2, (4, 22))


def test_nan_of_the_same_bits_is_equal_and_the_sign_of_zero_is_compared(damaged: Fixture, tmp_path: Path) -> None:
    other = damaged.copy_to(tmp_path / "other")
    nan = b"\x01\x00\xc0\x7f"
    for fixture, bits, zero in ((damaged, nan, 0.0), (other, nan, -0.0)):
        path, position = payload_position(open_checkpoint(fixture.run), EXP_AVG, MATRIX, 50)
        with path.open("r+b") as file:
            file.seek(position)
            file.write(bits + struct.pack("<f", zero))
    found = only_difference(compare(damaged.run, other.run))
    assert (found.different, found.signed_zeros, found.largest) == (1, 1, 0.0)
    assert found.first == ((1, 19), "0.0", "-0.0")


def test_infinity_is_no_largest_difference(damaged: Fixture) -> None:
    path, position = payload_position(open_checkpoint(damaged.run), EXP_AVG, MATRIX, 50)
    with path.open("r+b") as file:
        file.seek(position)
        file.write(struct.pack("<f", float("inf")))
    found = only_difference(compare(damaged.run, fixture_named("p01").run))
    assert (found.different, found.largest, found.first and found.first[1]) == (1, 0.0, "inf")
    json.loads(json.dumps(asdict(found), allow_nan=False))


def test_other_bits_of_nan_differ(damaged: Fixture, tmp_path: Path) -> None:
    other = damaged.copy_to(tmp_path / "other")
    for fixture, bits in ((damaged, b"\x01\x00\xc0\x7f"), (other, b"\x02\x00\xc0\x7f")):
        path, position = payload_position(open_checkpoint(fixture.run), EXP_AVG, MATRIX, 50)
        with path.open("r+b") as file:
            file.seek(position)
            file.write(bits)
    found = only_difference(compare(damaged.run, other.run))
    assert (found.different, found.first) == (1, ((1, 18), "nan", "nan"))
    json.loads(json.dumps(asdict(found), allow_nan=False))


@pytest.mark.parametrize(("value", "nonzero"), [(0.0, 0), (1.0, 320)])
def test_padding_of_the_vocabulary_is_distinguished(canonical: Path, value: float, nonzero: int) -> None:
    """Ten rows more, zero or not: not equal, and nothing else differs."""
    truth = fixture_named("p07").truth
    key = f"{EXP_AVG}.{EMBEDDINGS}"
    rewrite(canonical, {key: torch.cat([truth[key], torch.full((10, truth[key].shape[1]), value)])})
    for a, b, longer in ((fixture_named("p07").run, canonical, "B"), (canonical, fixture_named("p07").run, "A")):
        found = only_difference(compare(a, b))
        assert found.padding == PaddingRows(longer, 10, nonzero)
        assert (found.different, found.elements) == (0, truth[key].numel())


def test_names_shapes_and_dtypes(canonical: Path) -> None:
    truth = fixture_named("p07").truth
    rewrite(
        canonical,
        {
            f"{WEIGHT}.surplus": torch.zeros(3),
            f"{WEIGHT}.{MATRIX}": truth[f"{WEIGHT}.{MATRIX}"].float(),
            f"{FP32_PARAM}.{MATRIX}": truth[f"{FP32_PARAM}.{MATRIX}"].reshape(64, 64).clone(),
        },
    )
    found = compare(fixture_named("p07").run, canonical)
    weight, master = (next(kind for kind in found.kinds if kind.kind == name) for name in (WEIGHT, FP32_PARAM))
    assert (weight.only_in_a, weight.only_in_b) == ((), ("surplus",))
    assert compare(canonical, fixture_named("p07").run).kinds[0].only_in_a == ("surplus",)
    (retyped,) = weight.different
    assert (retyped.dtypes, retyped.different) == (("bfloat16", "float32"), 0)
    (reshaped,) = master.different
    assert reshaped.shapes == ((128, 32), (64, 64))
    assert reshaped.elements == 0
    assert not found.equal


def test_kinds_choose(damaged: Fixture) -> None:
    flip(*payload_position(open_checkpoint(damaged.run), EXP_AVG, MATRIX, 700))
    assert compare(damaged.run, fixture_named("p04").run, kinds=[WEIGHT, FP32_PARAM]).equal
    assert not compare(damaged.run, fixture_named("p04").run, kinds=[EXP_AVG]).equal
    with pytest.raises(UsageError, match="momentum_buffer; expected: weight or"):
        compare(damaged.run, fixture_named("p04").run, kinds=["momentum_buffer"])


def test_lost_elements_are_not_equal() -> None:
    run = fixture_named("p23").run
    found = compare(run, run)
    assert not found.equal
    problems = [tensor for kind in found.kinds for tensor in kind.different]
    assert {tensor.name for tensor in problems} == {EMBEDDINGS}
    assert all("does not contain every element" in tensor.problem for tensor in problems)


def test_another_iteration_is_a_setting(damaged: Fixture) -> None:
    common = torch.load(damaged.iteration / "common.pt", weights_only=False)
    common["iteration"] = 9
    torch.save(common, damaged.iteration / "common.pt")
    found = compare(damaged.run, fixture_named("p01").run)
    assert found.tensors_equal
    assert not found.equal
    assert [(one.name, one.a, one.b) for one in found.settings if not one.equal] == [("iteration", "9", "4")]
    assert compare(damaged.run, fixture_named("p01").run, tensors_only=True).equal
    assert ("iteration", "9", "4") in [(fact.what, fact.a, fact.b) for fact in found.facts]


def test_the_schema_is_stable(damaged: Fixture) -> None:
    flip(*payload_position(open_checkpoint(damaged.run), WEIGHT, MATRIX, 700))
    document = json.loads(json.dumps(asdict(compare(damaged.run, fixture_named("p01").run)), allow_nan=False))
    assert set(document) == {
        "schema", "a", "b", "options", "equal", "tensors_equal", "settings_equal", "kinds", "settings", "facts",
        *BESIDE,
    }  # fmt: skip
    assert document["schema"] == 6
    assert set(document["settings"][0]) == {"name", "a", "b", "equal"}
    kind = document["kinds"][0]
    assert set(kind) == {"kind", "compared", "elements", "only_in_a", "only_in_b", "different"}
    assert set(kind["different"][0]) == {
        "kind", "name", "shapes", "dtypes", "elements", "different", "signed_zeros", "largest", "first", "padding",
        "where", "problem",
    }  # fmt: skip


def test_the_same_folder_through_other_paths(damaged: Fixture, tmp_path: Path) -> None:
    shutil.copytree(damaged.iteration, tmp_path / "elsewhere")
    assert compare(damaged.run, tmp_path / "elsewhere").equal
