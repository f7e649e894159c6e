"""Test rehearsals of real checkpoints, intact and damaged, without Megatron, and the command's output."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt_ext import Legacy, convert
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.job.dimensions import PINS
from mcore_ckpt_ext.layout_choice.options import parse_sizes
from mcore_ckpt_ext.model_space.tensors import FP32_PARAM
from mcore_ckpt_ext.operations import assumed_release
from mcore_ckpt_ext.operations.layout_plan import plan
from mcore_ckpt_ext.rehearsal.rehearse import PACKAGE, STOCK, rehearse
from mcore_ckpt_ext.rehearsal.result import Rehearsal
from mcore_ckpt_ext.rehearsal.target import sizes_in
from tests.harness.checkpoints import APART, CORRUPTED, INTACT, fixture_named
from tests.harness.damage import MATRIX, flip, payload_position
from tests.harness.teams import in_team

LAYOUTS = {"tp=2": 4, "pp=2": 2}


@pytest.fixture(autouse=True)
def _without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)


def rehearsed(run: Path | str, layout: str, gpus: int, **options: Any) -> Rehearsal:
    source = fixture_named(run).run if isinstance(run, str) else run
    return rehearse(source, gpus, sizes_in(layout), **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*INTACT, *APART])
def test_an_intact_checkpoint_is_resumed_under_every_layout_that_megatron_accepts(name: str, layout: str) -> None:
    found = rehearsed(name, layout, LAYOUTS[layout], full=True)
    if found.refusal is not None:
        assert found.refusal.startswith("Megatron does not accept this layout: ")
        return
    assert found.will_succeed
    checkpoint = open_checkpoint(fixture_named(name).run)
    names = set(checkpoint.optimizer.state().names())
    assert found.parameters == len(names & checkpoint.job.models().weights.keys())
    assert found.elements > 0
    assert found.bytes_read > 0


@pytest.mark.parametrize(
    ("name", "layout", "gpus"),
    [("p01", "tp=2", 4), ("p09", "etp=4", 4), ("p22", "tp=2 ep=1 etp=4", 4), ("p44", "tp=1", 4), ("p44", "tp=1", 6),
     ("p47", "pp=2", 4), ("p47b", "tp=2", 4)],
)  # fmt: skip
def test_it_reads_what_the_plan_says(name: str, layout: str, gpus: int) -> None:
    run = fixture_named(name).run
    found = rehearsed(run, layout, gpus)
    pins = {"tp": 1, "pp": 1, "ep": 1, "cp": 1, "vpp": 1} | parse_sizes(layout)
    (planned,) = plan(run, gpus, pins=pins, most=None).layouts
    assert (found.will_succeed, found.new_layout) == (True, planned.layout)
    assert found.bytes_read == planned.read_in_all


@pytest.mark.thorough
@pytest.mark.parametrize("gpus", [None, 3])
@pytest.mark.parametrize("name", [*INTACT, *APART])
def test_it_says_of_a_layout_what_the_plan_says(name: str, gpus: int | None) -> None:
    """Of the job's own layout, and of the first for 3 GPUs, under which the global batch changes."""
    run = fixture_named(name).run
    first, *_ = plan(run, gpus or open_checkpoint(run).job.layout.world).layouts
    found = rehearsed(run, " ".join(f"{label}={first.sizes[label]}" for label in PINS), first.gpus)
    assert found.will_succeed
    assert found.bytes_read == first.read_in_all
    for said in ("flags", "removed_flags", "notes", "data", "differences"):
        assert getattr(found, said) == getattr(first, said), said
    if found.loaded_by is not None:
        assert (found.loaded_by == STOCK) == first.stock_resumes


def test_it_reads_what_the_plan_says_of_the_files_of_ranks(tmp_path: Path) -> None:
    """Muon keeps other state of matrices than of other parameters, of which legacy files have no names."""
    convert(fixture_named("p43").run, tmp_path / "legacy", Legacy())
    found = rehearsed(tmp_path / "legacy", "pp=2", 4)
    (planned,) = plan(tmp_path / "legacy", 4, pins={"tp": 1, "pp": 2, "vpp": 1}).layouts
    assert found.bytes_read == planned.read_in_all


def test_every_instance_of_the_optimizer_reads_its_state() -> None:
    run = fixture_named("p01").run
    arguments = {"num_distributed_optimizer_instances": 2}
    found = rehearsed(run, "tp=2", 4, arguments=arguments)
    (planned,) = plan(run, 4, pins={"tp": 2, "pp": 1}, arguments=arguments).layouts
    assert found.bytes_read == planned.read_in_all > rehearsed(run, "tp=2", 4).bytes_read


def test_another_global_batch_is_another_training() -> None:
    found = rehearsed("p01", "tp=1", 3)
    assert "--global-batch-size 9 --override-opt_param-scheduler" in found.flags
    assert found.data is not None and "not known whether in the same order" in found.data.sentence
    assert [difference.feature for difference in found.differences] == ["another --global-batch-size"]
    assert found.notes[0].startswith("the global batch changes from 8 to 9")


def test_the_release_is_that_of_the_checkpoint_where_none_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assumed_release, "is_installed", lambda: False)
    found = rehearsed("p01", "tp=2", 4)
    assert (found.megatron_version, found.megatron_version_source) == (
        "0.16",
        "that of the checkpoint; none is installed",
    )
    assert rehearsed("p01", "tp=2", 4, megatron_version="0.18").megatron_version_source == "as stated"


def test_layers_stored_in_the_other_form_are_resumed() -> None:
    """`--moe-layer-freq` as a list describes the same model, and another one is refused."""
    assert rehearsed("p09", "ep=2", 2, changes={"moe_layer_freq": [1, 1, 1, 1]}).will_succeed
    with pytest.raises(UsageError, match="describes another model"):
        rehearsed("p09", "ep=2", 2, changes={"moe_layer_freq": 2})


@pytest.mark.parametrize("name", [name for name in CORRUPTED if name.startswith("p23")])
def test_lost_elements_are_refused(name: str) -> None:
    found = rehearsed(name, "pp=2", 2)
    assert not found.will_succeed
    assert found.refusal is not None
    assert "elements in no slot" in found.refusal
    assert found.loaded_by == PACKAGE
    assert (found.why or "").startswith("shifted parameters;")


@pytest.mark.parametrize(
    ("name", "layout", "gpus", "loader", "check"),
    [
        ("p02", "tp=2 pp=2", 8, STOCK, None),
        ("p04", "tp=2", 4, STOCK, None),
        ("p10", "tp=2", 4, PACKAGE, "layout"),
        ("p08", "pp=2", 4, PACKAGE, "files"),
        ("p09", "pp=2", 4, PACKAGE, "number of optimizers"),
        ("p45", "pp=2", 4, PACKAGE, "CPU offloading"),
        ("p47b", "tp=2", 4, PACKAGE, "optimizer arguments"),
        ("p43", "pp=2", 4, None, None),
        ("p22", "pp=2 ep=2", 8, STOCK, None),
        ("p09", "ep=4", 4, PACKAGE, "layout"),
        ("p51", "tp=2", 4, None, None),
    ],
)
def test_who_loads_the_optimizer(name: str, layout: str, gpus: int, loader: str | None, check: str | None) -> None:
    found = rehearsed(name, layout, gpus)
    assert found.loaded_by == loader
    assert (found.why or "").partition(";")[0] == (check or "")


@pytest.mark.parametrize(("version", "check"), [("0.18.2", "files"), ("0.19.0", "layout")])
def test_an_earlier_release_does_not_read_the_files_of_a_later_one(version: str, check: str) -> None:
    found = rehearsed("p10", "tp=2", 4, megatron_version=version)
    assert (found.why or "").partition(";")[0] == check


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"lr": 5e-4}, "another learning rate, 0.0005 instead of 0.001"),
        ({"lr": 5e-4, "override_opt_param_scheduler": True}, None),
        ({"min_lr": 1e-6, "use_checkpoint_opt_param_scheduler": True}, None),
        ({"use_distributed_optimizer": False}, None),
        ({"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}, None),
    ],
)
def test_options_that_differ(changes: dict[str, Any], refused: str | None) -> None:
    """Megatron's scheduler refuses other learning rates; kinds of Adam are taken from each other."""
    found = rehearsed("p10", "pp=2", 4, changes=changes)
    assert found.will_succeed == (refused is None), found.refusal
    assert refused is None or refused in str(found.refusal)
    assert refused is None or "--override-opt_param-scheduler uses the schedule" in str(found.refusal)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"vocab_size": 200}, r"rows in the checkpoint.*new are tokens 128 to 199"),
        ({"vocab_size": 100}, r"vocabulary is smaller.*127 tokens; expected: at most 100, padding included"),
        ({"vocab_size": 60, "make_vocab_size_divisible_by": 8}, r"vocabulary is smaller.*at most 64"),
        ({"vocab_size": 100, "make_vocab_size_divisible_by": 16}, None),
    ],
)
def test_the_vocabulary_has_the_rows_that_the_job_pads_it_to(changes: dict[str, Any], refused: str | None) -> None:
    """By the divisor among the flags that the rehearsal prints, or by the one that is given."""
    found = rehearsed(fixture_named("p10").run, "tp=2", 2, changes=changes)
    assert found.will_succeed == (refused is None)
    assert refused is None or re.search(refused, str(found.refusal), re.DOTALL)


def test_two_schedules_are_refused() -> None:
    """Megatron asserts that its two flags are not set together."""
    changes: dict[str, Any] = dict.fromkeys(
        ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"), True
    )
    with pytest.raises(UsageError, match="that of the checkpoint; found: .*expected: one of them"):
        rehearsed("p10", "pp=2", 4, changes=changes)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"fp16": True}, "Megatron computes in bf16 or in fp16; found: bf16 and fp16"),
        ({"ddp_num_buckets": 2, "ddp_bucket_size": 64}, "the number of buckets or their size"),
        ({"min_lr": 5.0}, "no such bounds; found: min_lr 5.0, lr 0.001"),
        ({"weight_decay": -0.1}, "no such bounds; found: start_weight_decay -0.1"),
        ({"end_weight_decay": 0.1}, "is constant, without a start or an end; found: end_weight_decay"),
        ({"min_lr": -1e-6}, "min_lr: -1e-06; expected: a finite number, 0 or more"),
        ({"ddp_num_buckets": 0}, "ddp_num_buckets: 0; expected: a whole number from 1"),
        ({"make_vocab_size_divisible_by": 0}, "make_vocab_size_divisible_by: 0; expected: a whole number from 1"),
        ({"lr_decay_style": "banana"}, "lr_decay_style: 'banana'; expected: constant, linear, cosine"),
        ({"weight_decay_incr_style": "banana"}, "weight_decay_incr_style: 'banana'; expected: constant, linear"),
        ({"exp_avg_dtype": "banana"}, "exp_avg_dtype: 'banana'; expected: fp32, fp16, bf16, fp8"),
        ({"exp_avg_dtype": "bf16"}, "only with --use-precision-aware-optimizer; found: exp_avg_dtype"),
        ({"optimizer_cpu_offload": True}, "only with --use-precision-aware-optimizer; found: optimizer_cpu_offload"),
        (
            {"use_precision_aware_optimizer": True, "use_distributed_optimizer": False},
            "only with --use-distributed-optimizer; found: use_precision_aware_optimizer",
        ),
    ],
)
def test_changes_that_megatron_asserts_against(changes: dict[str, Any], refusal: str) -> None:
    """They are the user's, and are refused before anything is simulated."""
    with pytest.raises(UsageError, match=refusal):
        rehearsed("p10", "pp=2", 4, changes=changes)


@pytest.mark.parametrize("value", ["banana", -1])
def test_a_change_with_a_value_that_no_job_can_have(value: object) -> None:
    """The user is wrong, and not the checkpoint."""
    with pytest.raises(UsageError, match=f"ddp_bucket_size: .?{value}.*correct the value after --change"):
        rehearsed("p10", "pp=2", 4, changes={"ddp_bucket_size": value})


def test_a_missing_file(tmp_path: Path) -> None:
    copy = fixture_named("p10").copy_to(tmp_path / "copy")
    (copy.iteration / "__2_0.distcp").unlink()
    found = rehearsed(copy.run, "tp=2", 2)
    assert found.refusal is not None
    assert found.is_verbatim
    assert re.search(r"cannot be opened.*__2_0\.distcp.*use another iteration", found.refusal, re.DOTALL)


def test_the_missing_state_of_a_rank_was_not_frozen(tmp_path: Path) -> None:
    copy = fixture_named("p08b").copy_to(tmp_path / "copy")
    (copy.iteration / "mp_rank_00_000" / "distrib_optim.pt").unlink()
    found = rehearsed(copy.run, "tp=2", 4)
    assert found.refusal is not None
    assert found.is_verbatim
    assert "rank 2, 3: ModelMismatchError: the model has a parameter that the checkpoint lacks" in found.refusal
    assert "fp32_param decoder.layers.0.mlp.linear_fc2.bias" in found.refusal


def test_a_rank_that_reads_a_part_is_not_quoted(tmp_path: Path) -> None:
    """Of two data-parallel ranks, only those that read the file refuse."""
    copy = fixture_named("p02").copy_to(tmp_path / "copy")
    (copy.iteration / "__0_1.distcp").unlink()
    found = rehearsed(copy.run, "tp=2", 4)
    assert found.refusal is not None
    assert not found.is_verbatim


def test_another_iteration_is_named_where_one_is_complete(tmp_path: Path) -> None:
    copy = fixture_named("p10").copy_to(tmp_path / "copy")
    newer = copy.run / "iter_0000008"
    newer.mkdir()
    (copy.run / "latest_checkpointed_iteration.txt").write_text("8")
    (newer / "metadata.json").write_bytes((copy.iteration / "metadata.json").read_bytes())
    found = rehearsed(copy.run, "tp=2", 2)
    assert found.refusal is not None
    assert "iteration 8 is not complete" in found.refusal
    assert "--ckpt-step 4" in found.refusal


def test_stock_megatron_refuses_in_words_of_its_own(tmp_path: Path) -> None:
    copy = fixture_named("p04").copy_to(tmp_path / "copy")
    path, position = payload_position(open_checkpoint(copy.run), FP32_PARAM, MATRIX, 0)
    flip(path, position + 3)
    found = rehearsed(copy.run, "tp=2", 4, full=True)
    assert (found.loaded_by, found.will_succeed, found.is_verbatim) == (STOCK, False, False)


def test_damage_between_the_samples_shows_when_all_is_compared(tmp_path: Path) -> None:
    copy = fixture_named("p10").copy_to(tmp_path / "copy")
    path, position = payload_position(open_checkpoint(copy.run), FP32_PARAM, MATRIX, 2048)
    flip(path, position + 3)
    assert rehearsed(copy.run, "tp=1", 1).will_succeed
    found = rehearsed(copy.run, "tp=1", 1, full=True)
    assert found.refusal is not None
    assert f"{MATRIX}, element 2048 of this rank's part" in found.refusal


@pytest.mark.parametrize("is_damaged", [False, True])
def test_processes_that_share_a_rehearsal_end_with_its_result(is_damaged: bool, tmp_path: Path) -> None:
    """Each of them proves a part of the masters, and all refuse in the words of a single process."""
    copy = fixture_named("p10").copy_to(tmp_path / "copy")
    if is_damaged:
        path, position = payload_position(open_checkpoint(copy.run), FP32_PARAM, MATRIX, 0)
        flip(path, position + 3)
    alone = rehearsed(copy.run, "tp=2 pp=2", 4)
    assert alone.will_succeed != is_damaged
    found = in_team(3, lambda team: rehearsed(copy.run, "tp=2 pp=2", 4, team=team))
    assert found == [alone] * 3


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    run = str(fixture_named("p10").run)
    assert main(["plan", run, "--gpus", "4", "--rehearse", "tp=2 pp=2"]) == 0
    assert "\nthis resume will succeed: iteration 4 as TP2 x PP2 x DP1, " in capsys.readouterr().out
    assert main(["plan", run, "--gpus", "3", "--rehearse", "tp=3"]) == 1
    shown = capsys.readouterr().out
    assert "this resume will be refused" in shown
    assert "4 attention heads cannot be divided by TP 3" in shown
    assert "will succeed" not in shown


@pytest.mark.parametrize(
    "words",
    [
        ["--rehearse", "tp=2 xx=2"], ["--rehearse", "tp=zero"], ["--rehearse", "tp=0"], ["--rehearse", "tp=-1"],
        ["--rehearse", ""], ["--rehearse", "tp=2 tp=2"], ["--rehearse", "tp=2", "--change", "num_layers=5"],
        ["--rehearse", "tp=2", "--pin", "pp=2"], ["--rehearse", "tp=2", "--all"], ["--full"],
        ["--rehearse", "tp=2", "--gpus", "0"], ["--rehearse", "tp=2", "--change", "bf16"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", os.fspath(fixture_named("p10").run), "--gpus", "2", *words]
    try:
        code = main(command)
    except SystemExit as stop:
        code = int(str(stop.code))
    assert code == 2
    assert "Traceback" not in capsys.readouterr().err
