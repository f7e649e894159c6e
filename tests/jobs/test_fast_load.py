"""Test `--ckpt-ext-load fast`: a checkpoint that Megatron 0.19.2 loads itself is equal bit for bit.

The layout is unchanged except for the data-parallel ranks; `test_formats` resumes under others.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from megatron_on_cpu.dump_optimizer import assemble

from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.torch_dist.reader import TorchDistCheckpoint
from mcore_ckpt_ext.megatron.check_after_load import PROVEN
from mcore_ckpt_ext.model_space.tensors import EXP_AVG, WEIGHT
from mcore_ckpt_ext.settings import LOAD, VERIFY_ALL
from mcore_ckpt_ext.storage.torch_archive import TorchArchive
from tests.harness.cases import Case, Outcomes, load_all
from tests.harness.checkpoints import fixture_named
from tests.harness.damage import MATRIX, flip, payload_position
from tests.harness.jobs import RANK_SCRIPTS, TIME_LIMIT, copy_of, differing, run_job
from tests.harness.layouts import Layout

LAYOUT = Layout(1, 4, 4)
# dp_reshardable of 0.16 and 0.19, fully_reshardable, dp_zero_gather_scatter of 0.8.
FIXTURES = ["p01", "p10", "p04", "p06"]
FAST, STOCK = {"MCORE_CKPT_EXT_LOAD": "fast"}, {"MCORE_CKPT_EXT_LOAD": "stock"}
ONCE = {**FAST, "MCORE_CKPT_EXT_READ_ONCE": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fast")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    cases = []
    for name in FIXTURES:
        run = fixture_named(name).run
        cases += [Case(f"{name} stock", run, environment=STOCK)]
        cases += [Case(f"{name} fast", run, environment=FAST, dump=folder / name)]
    p10 = fixture_named("p10").run
    cases += [
        Case("nobody asked", p10),
        Case("weights alone", p10, {"no_load_optim": True}, FAST),
        Case("asked by argument", p10, {"ckpt_ext_load": "fast"}, STOCK),
        Case("another shape", p10, environment=FAST, model={"ffn_hidden_size": 64}),
        Case("damaged", damaged(folder / "damaged"), environment=FAST),
        Case("another weight", with_a_flip(folder / "weight", WEIGHT), environment=FAST),
        Case("another moment", with_a_flip(folder / "moment", EXP_AVG), environment=FAST),
        Case("another moment, checked", folder / "moment", environment={**FAST, VERIFY_ALL.name: "full"}),
        Case("all checked", p10, environment={**FAST, VERIFY_ALL.name: "full"}),
        Case("cut short", cut_short(folder / "short"), environment=FAST),
        Case("objects damaged", damaged_object(folder / "object"), environment=FAST),
        Case("the disk is gone", p10, environment={**FAST, "TEST_READ_FAILS": "2"}),
        Case("read once", p10, environment=ONCE),
        Case("nothing to send", p10, environment={**ONCE, "TEST_SHARED_READ_FAILS": "0"}),
        Case("nothing to read", p10, environment={**ONCE, "TEST_OWN_READ_FAILS": "3"}),
    ]
    return load_all(folder / "job", LAYOUT, cases)


def damaged(run: Path) -> Path:
    """A copy with a flipped bit in the description of one tensor."""
    copy = copy_of(fixture_named("p10").run, run)
    checkpoint = open_checkpoint(copy)
    weights = checkpoint.stored_slices("weight", "decoder.layers.3.mlp.linear_fc1.weight")
    flip(checkpoint.files.folder / weights[0].extent.file, weights[0].extent.offset + 70)
    return copy


def with_a_flip(run: Path, kind: str) -> Path:
    """A copy with a flipped bit in one element of a tensor."""
    copy = copy_of(fixture_named("p10").run, run)
    path, position = payload_position(open_checkpoint(copy), kind, MATRIX, 5)
    flip(path, position + 1)
    return copy


def cut_short(run: Path) -> Path:
    """A copy of which a file lacks its second half."""
    copy = copy_of(fixture_named("p10").run, run)
    file = max(copy.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    return copy


def damaged_object(run: Path) -> Path:
    """A copy in which the pickled state of a random generator is none."""
    copy = copy_of(fixture_named("p10").run, run)
    checkpoint = open_checkpoint(copy).format.reader
    assert isinstance(checkpoint, TorchDistCheckpoint)
    for key, extent in checkpoint.index.objects.items():
        if key.startswith("rng_state/"):
            archive = TorchArchive(checkpoint.files.reader, extent.file, extent.offset, extent.length)
            flip(checkpoint.folder / extent.file, extent.offset + archive._record("data.pkl")[0] + 2, 0xFF)
    return copy


@pytest.mark.parametrize("name", FIXTURES)
def test_the_state_is_that_of_the_job_that_wrote(name: str, outcomes: Outcomes, folder: Path) -> None:
    assert [rank["error"] for rank in outcomes[f"{name} fast"]] == [None] * LAYOUT.ranks
    assert differing(fixture_named(name).truth, assemble(folder / name)) == []


@pytest.mark.parametrize("name", FIXTURES)
def test_groups_and_state_are_what_stock_leaves(name: str, outcomes: Outcomes) -> None:
    for fast, stock in zip(outcomes[f"{name} fast"], outcomes[f"{name} stock"], strict=True):
        assert (fast["after"], fast["iteration"]) == (stock["after"], stock["iteration"])
        assert fast["after"] != fast["before"]


@pytest.mark.parametrize("name", FIXTURES)
def test_this_package_read_the_tensors_and_said_so(name: str, outcomes: Outcomes) -> None:
    for fast, stock in zip(outcomes[f"{name} fast"], outcomes[f"{name} stock"], strict=True):
        assert (stock["fast"], stock["lines"], stock["resumes"]) == (0, [], 0)
        assert fast["resumes"] == 0
        assert fast["fast"] > 0
        (line,) = fast["lines"]
        assert re.fullmatch(rf"{LOAD.flag}: [\d,.]+ MB of tensors read in [\d.]+ s; {PROVEN}", line)


@pytest.mark.parametrize("name", FIXTURES)
def test_the_index_is_read_by_one_rank_for_all(name: str, outcomes: Outcomes) -> None:
    first, *others = (rank["index reads"] for rank in outcomes[f"{name} fast"])
    assert first > 0
    assert others == [0] * (LAYOUT.ranks - 1)
    assert all(rank["index reads"] > 0 for rank in outcomes[f"{name} stock"])


def test_megatron_itself_gets_its_own_arguments(outcomes: Outcomes) -> None:
    assert all(rank["passed_through"] == [True] for rank in outcomes["p10 fast"])


def test_without_being_asked_nothing_changes_under_the_same_layout(outcomes: Outcomes) -> None:
    for rank, stock in zip(outcomes["nobody asked"], outcomes["p10 stock"], strict=True):
        assert (rank["error"], rank["fast"], rank["after"]) == (None, 0, stock["after"])


def test_weights_without_the_optimizer(outcomes: Outcomes) -> None:
    for rank, all_of_it in zip(outcomes["weights alone"], outcomes["p10 fast"], strict=True):
        assert (rank["error"], rank["iteration"]) == (None, 4)
        assert 0 < rank["fast"] < all_of_it["fast"]


def test_the_argument_counts_more_than_the_variable(outcomes: Outcomes) -> None:
    assert all(rank["error"] is None and rank["fast"] > 0 for rank in outcomes["asked by argument"])


def test_unsupported_requests_are_left_to_megatron_on_every_rank(outcomes: Outcomes) -> None:
    """A smaller model: Megatron refuses, in its own words, after one line of ours."""
    for rank in outcomes["another shape"]:
        assert rank["fast"] == 0
        (line,) = rank["lines"]
        assert "Megatron's own loader reads this checkpoint (rank 0: decoder.layers.mlp.linear_fc1" in line
        assert "Global shape mismatch" in rank["error"]


def test_damage_stops_every_rank_before_anything_is_written(outcomes: Outcomes) -> None:
    for rank in outcomes["damaged"]:
        assert rank["error"].startswith("ResumeRefusedError: mcore_ckpt_ext refused while planning the load")
        assert "nothing is written yet" in rank["error"]
        assert "data.pkl" in rank["error"]
        assert rank["after"] == rank["before"]


def test_a_weight_that_is_not_its_masters_stops_every_rank(outcomes: Outcomes) -> None:
    for rank in outcomes["another weight"]:
        assert rank["error"].startswith("ProofError: after this load 1 parameter has masters that do not round")
        assert f"{MATRIX}, element 5: master " in rank["error"]


def test_checksums_show_what_no_proof_can_where_they_are_asked_for(outcomes: Outcomes) -> None:
    """Nothing says what a moment should be; Megatron's own loader looks at no checksum."""
    assert all(rank["error"] is None for rank in outcomes["another moment"])
    for rank in outcomes["another moment, checked"]:
        assert rank["error"].startswith("ResumeRefusedError: mcore_ckpt_ext refused while planning the load")
        assert "checksum" in rank["error"]
        assert rank["after"] == rank["before"]
    for rank, unchecked in zip(outcomes["all checked"], outcomes["p10 fast"], strict=True):
        assert (rank["error"], rank["after"]) == (None, unchecked["after"])


def test_a_file_that_is_cut_short_stops_every_rank_before_anything_is_written(outcomes: Outcomes) -> None:
    for rank in outcomes["cut short"]:
        assert ".distcp" in rank["error"]
        assert "bytes" in rank["error"]
        assert rank["after"] == rank["before"]


def test_of_a_damaged_object_it_says_which_before_anything_is_written(outcomes: Outcomes) -> None:
    for rank in outcomes["objects damaged"]:
        assert "refused while reading the pickled objects; nothing is written yet" in rank["error"]
        assert re.search(r"where: rng_state/shard_\S+, byte \d+ of \S+\.distcp", rank["error"])
        assert rank["after"] == rank["before"]


def test_tied_copies_are_read_by_one_rank_and_sent(outcomes: Outcomes) -> None:
    for rank, other in zip(outcomes["read once"], outcomes["p10 fast"], strict=True):
        assert (rank["error"], rank["after"], rank["fast"]) == (None, other["after"], other["fast"])
    bytes_read = {
        name: sum(stop - start for rank in outcomes[name] for _, start, stop in rank["reads"])
        for name in ("read once", "p10 fast")
    }
    embedding = 2 * 128 * 32
    assert bytes_read["p10 fast"] - bytes_read["read once"] == embedding


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("the disk is gone", "rank 2: OSError"),
        ("nothing to send", "rank 0: OSError"),
        ("nothing to read", "rank 3: OSError"),
    ],
)
def test_a_read_error_stops_every_rank(name: str, reason: str, outcomes: Outcomes) -> None:
    for rank in outcomes[name]:
        assert "refused while reading the model; it is partly written: do not train on, start again" in rank["error"]
        assert reason in rank["error"]
        assert rank["iteration"] is None


def test_of_a_rank_that_dies_while_it_reads_the_others_die(tmp_path: Path) -> None:
    """The first, for whose part of the tied embedding the last one waits, too."""
    environment = {**ONCE, "PYTHONUNBUFFERED": "1"}
    run = fixture_named("p10").run
    ended = run_job(tmp_path, LAYOUT, load=run, environment=environment, plugins=[RANK_SCRIPTS / "die_reading.py"])
    assert ended.returncode != 0
    assert ended.seconds < TIME_LIMIT / 2
    assert "successfully loaded checkpoint" not in ended.output
    assert not (tmp_path / "losses.json").exists()
