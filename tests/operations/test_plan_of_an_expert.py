"""Test what an expert looks for in a plan: continuity, the vocabulary, unknown batches, fewer GPUs, flags to remove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt_ext
from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import UsageError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.layout_choice.found_layout import FoundLayout
from mcore_ckpt_ext.layout_choice.options import parse_sizes
from mcore_ckpt_ext.layout_choice.padded_rows import PaddedRows
from mcore_ckpt_ext.operations.elastic_layout import choose_layout
from mcore_ckpt_ext.operations.layout_flags import arguments_of, flags_of, notes_of, removed_flags_of
from mcore_ckpt_ext.operations.layout_plan import plan
from tests.harness.checkpoints import fixture_named
from tests.harness.layout_search import SIZES, found_for


def best_of(gpus: int, **more: Any) -> FoundLayout:
    """The first layout."""
    return found_for(gpus, **more).found[0]


def test_the_stored_backend_of_attention_decides_what_is_kept() -> None:
    """A checkpoint stores `--attention-backend unfused` as a member of an enumeration."""
    run, arguments = fixture_named("p02").run, {"seq_length": 4096, "transformer_impl": "transformer_engine"}
    backends: tuple[dict[str, str], ...] = ({}, {"attention_backend": "flash"})
    unfused, flash = (plan(run, 8, arguments={**arguments, **backend}).layouts[0].memory for backend in backends)
    assert unfused.activations > 50 * flash.activations


def test_the_old_layout_comes_first_in_the_old_flags() -> None:
    """For the GPUs of the old job, with the division of the layers that the job had."""
    layout = {"pipeline_model_parallel_size": 3, "data_parallel_size": 2, "world_size": 6}
    old = {"decoder_first_pipeline_num_layers": 2, **layout}
    first = best_of(6, **old)
    assert arguments_of(first).items() >= old.items()
    assert "--decoder-first-pipeline-num-layers 2" in flags_of(first)
    text = "Et|ttt|ttttL"
    named = best_of(6, pipeline_model_parallel_layout=text, **layout)
    assert f"--pipeline-model-parallel-layout '{text}'" in flags_of(named)


def test_layouts_that_change_less_come_first() -> None:
    """Another context parallel size, and a division of layers that the job did not have, come later."""
    found = found_for(6, data_parallel_size=6, world_size=6).found
    is_plain = [
        one.choice.layout.context == 1
        and not any("pipeline-" in flag and "layers" in flag or "'" in flag for flag in flags_of(one))
        for one in found
    ]
    assert is_plain == sorted(is_plain, reverse=True) and not all(is_plain)


def test_an_unknown_global_batch_is_not_one() -> None:
    """It is said to be unknown; no batch is made up, and no change is claimed."""
    job = {**SIZES, "global_batch_size": None}
    (first, *_) = found_for(6, **job).found
    assert first.choice.keeps_batch and not any("batch" in flag for flag in flags_of(first))
    notes = notes_of(first, first.choice.job, True)
    assert notes[0] == "the global batch is unknown: state it with --argument global_batch_size=NUMBER"
    assert not any("changes from" in note for note in notes)


@pytest.mark.parametrize(
    ("tokens", "stored", "divisor", "tensor", "expected"),
    [
        (50257, 50304, 128, 1, (None, 50304)),
        (50257, 50304, 128, 4, (12, 50304)),
        (50257, 50304, 128, 5, (None, 50560)),
        (None, 1024, 128, 16, (64, 1024)),
        (1000, 0, 128, 2, (None, 1024)),
    ],
)
def test_the_vocabulary_keeps_its_rows(
    tokens: int | None, stored: int, divisor: int, tensor: int, expected: tuple[int | None, int]
) -> None:
    """Another divisor keeps the rows of padding wherever the size divides them."""
    rows = PaddedRows(tokens, stored, divisor)
    assert (rows.divisor_for(tensor), rows(tensor)) == expected


def test_the_flags_keep_the_rows_or_a_note_says_how_many() -> None:
    """`--make-vocab-size-divisible-by` is in the flags; where it cannot help, both numbers are said."""
    rows = PaddedRows(50257, 50304, 128)
    (kept,) = {
        str(one.choice.layout): one for one in found_for(4, rows, {"tensor": 4}).found if one.choice.layout.world == 4
    }.values()
    assert "--make-vocab-size-divisible-by 12" in flags_of(kept)
    assert not any("padded" in note for note in notes_of(kept, kept.choice.job, True))
    other = PaddedRows(1000, 1001, 7)
    (changed, *_) = found_for(2, other, {"tensor": 2}).found
    assert any("padded from 1,001 to 1,008 rows" in note for note in notes_of(changed, changed.choice.job, True))


def test_fewer_gpus_may_be_better() -> None:
    """For 7 GPUs a job of TP2 has layouts of 6 and 4, which keep its tensor parallel size and its batch."""
    found = plan(fixture_named("p02").run, 7)
    assert all(one.sizes["tp"] == 1 for one in found.layouts)
    assert [one.gpus for one in found.fewer] and all(one.gpus < 7 and one.sizes["tp"] == 2 for one in found.fewer)
    assert not plan(fixture_named("p02").run, 8).fewer


@pytest.mark.parametrize("name", ["p01", "p02", "p12", "p22"])
def test_the_first_of_fewer_gpus_is_what_an_elastic_job_chooses(name: str) -> None:
    """A stage without layers, or idle stages, may make 5 or 6 GPUs slower than 4."""
    run = fixture_named(name).run
    first, *_ = plan(run, 7).fewer
    assert first.layout == choose_layout(run, 7).layout


def test_fewer_gpus_where_no_layout_uses_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Two instances of the optimizer have no layout on 3 GPUs, but one on 2."""
    run = str(fixture_named("p01").run)
    assert main(["plan", run, "--gpus", "3", "--argument", "num_distributed_optimizer_instances=2"]) == 1
    shown = capsys.readouterr().out
    assert "no layout of 3 GPUs is accepted" in shown and "2  TP1 x PP1 x DP2" in shown


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("p22", "0.19.2", True),
        ("p09", "0.16.1", True),
        ("p12", "0.16.1", False),
        ("p32", "0.15.0", True),
        ("p32", "0.16.1", False),
        ("p45", "0.19.2", False),
        ("p49", "0.16.1", False),
    ],
)
def test_stock_resumes_as_the_policy_says(name: str, version: str, expected: bool) -> None:
    """Under the job's own layout: torch's Adam, zarr, an offloaded optimizer and a folder without arguments."""
    run = fixture_named(name).run
    gpus = open_checkpoint(run).job.layout.world
    assert plan(run, gpus, megatron_version=version).layouts[0].stock_resumes is expected


def test_flags_that_must_go() -> None:
    """Flags of the old job that contradict the new ones are named."""
    old = {"decoder_first_pipeline_num_layers": 2, "pipeline_model_parallel_size": 3, "data_parallel_size": 2}
    old |= {"world_size": 6, "num_layers_per_virtual_pipeline_stage": 1}
    (other, *_) = found_for(4, pins={"pipeline": 2, "virtual_pipeline": 1}, **old).found
    removed = removed_flags_of(other, other.choice.job)
    assert removed == ["--decoder-first-pipeline-num-layers", "--num-layers-per-virtual-pipeline-stage"]
    assert removed_flags_of(best_of(4), best_of(4).choice.job) == []


def test_two_flags_of_the_schedule_are_not_given_together() -> None:
    """With `use_checkpoint_opt_param_scheduler`, `--override-opt_param-scheduler` is not in the flags."""
    (changed, *_) = found_for(5, pins={"tensor": 1, "pipeline": 1, "context": 1}).found
    assert "--override-opt_param-scheduler" in flags_of(changed)
    keeps = {"use_checkpoint_opt_param_scheduler": True}
    assert "--override-opt_param-scheduler" not in flags_of(changed, keeps)


FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
FULL_FLAGS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OF_FULL = ("--recompute-method", "--recompute-num-layers")


@pytest.mark.parametrize(
    ("job", "wanted", "flags", "removed"),
    [
        ({}, "full", FULL_FLAGS, ()),
        ({}, "none", "", ()),
        ({}, "selective", "--recompute-granularity selective", ()),
        ({"recompute_granularity": "selective"}, "selective", "", ()),
        ({"recompute_granularity": "selective"}, "full", FULL_FLAGS, ("--recompute-activations",)),
        ({"recompute_granularity": "selective"}, "none", "", ("--recompute-granularity", "--recompute-activations")),
        (FULL, "full", "", ()),
        (FULL, "selective", "--recompute-granularity selective", OF_FULL),
        (FULL, "none", "", ("--recompute-granularity", *OF_FULL)),
        (FULL, None, "", ()),
    ],
)
def test_the_flags_of_another_recomputation(
    job: dict[str, Any], wanted: str | None, flags: str, removed: tuple[str, ...]
) -> None:
    """A layout that fits with it needs its flags; what the old job needed follows from the old job's."""
    arguments = {"seq_length": 4096, "transformer_impl": "local", **job}
    run = fixture_named("p02").run
    before = plan(run, 8, arguments=arguments)
    found = plan(run, 8, arguments=arguments, recomputation=wanted)
    first = found.layouts[0]
    words = first.flags.split(" --")
    assert " ".join(f"--{word}" for word in words if word.startswith("recompute")) == flags
    assert first.removed_flags == removed
    assert found.gpu_memory == before.gpu_memory


def test_optimizer_instances_divide_the_ranks() -> None:
    """`initialize_model_parallel` refuses other numbers; each instance keeps a whole optimizer."""
    found = found_for(6, num_distributed_optimizer_instances=2)
    assert all(one.choice.layout.data * one.choice.layout.context % 2 == 0 for one in found.found)
    assert "optimizer instances" in found.excluded
    (one,) = found_for(6, pins={"tensor": 1, "pipeline": 1, "context": 1}, num_distributed_optimizer_instances=2).found
    assert one.choice.optimizer_ranks == 3


def test_overlapped_experts_need_expert_parallelism() -> None:
    """And virtual stages with a pipeline (`TransformerConfig.__post_init__`)."""
    found = found_for(8, num_experts=8, moe_ffn_hidden_size=8, overlap_moe_expert_parallel_comm=True).found
    layouts = [one.choice.layout for one in found]
    assert layouts and all(one.expert > 1 and (one.pipeline == 1 or one.virtual_pipeline > 1) for one in layouts)


def test_groups_of_micro_batches() -> None:
    """A group is at least PP and at most the micro batches, and so is what remains (`schedules.py`)."""
    pins = {"pipeline": 4, "tensor": 1, "context": 1, "virtual_pipeline": 2}
    (kept,) = found_for(4, pins=pins, microbatch_group_size_per_vp_stage=10, global_batch_size=34).found
    (other,) = found_for(4, pins=pins, microbatch_group_size_per_vp_stage=10, global_batch_size=32).found
    assert kept.choice.keeps_batch and not other.choice.keeps_batch and other.choice.global_batch == 30
    assert not found_for(4, pins=pins, microbatch_group_size_per_vp_stage=3).found


def test_stages_without_layers() -> None:
    """Four layers on PP4 with two virtual stages each, of which some have none."""
    (one,) = plan(fixture_named("p01").run, 4, pins={"pp": 4, "vpp": 2, "tp": 1, "cp": 1}).layouts
    assert "--pipeline-model-parallel-layout 'E|(t|)*4||L'" in one.flags


def test_one_syntax_of_sizes() -> None:
    """One text or several, separated by spaces or commas; each dimension once."""
    assert parse_sizes("tp=2 pp=3") == parse_sizes("tp=2,pp=3") == {"tp": 2, "pp": 3}
    with pytest.raises(UsageError, match="given twice"):
        parse_sizes("tp=2 tp=3")


@pytest.mark.parametrize(
    "options",
    [["--pin", "tp=2 pp=2"], ["--pin", "tp=2", "pp=2"], ["--pin", "tp=2", "--pin", "pp=2"], ["--pin", "tp=2,pp=2"]],
)
def test_pins_on_the_command_line(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every spelling is the same."""
    assert main(["plan", str(fixture_named("p01").run), "--gpus", "4", "--json", "--all", *options]) == 0
    layouts = {one["layout"] for one in json.loads(capsys.readouterr().out)["layouts"]}
    assert layouts == {"TP2 x PP2 x DP1", "TP2 x PP2 x VPP2 x DP1"}


def test_a_dimension_twice_or_a_word_as_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    """Both are refused, and say what is wrong."""
    run = str(fixture_named("p01").run)
    assert main(["plan", run, "--gpus", "4", "--pin", "tp=2", "--pin", "tp=4"]) == 2
    assert "given twice" in capsys.readouterr().err
    assert main(["plan", run, "--gpus", "4", "--argument", "global_batch_size=banana"]) == 2
    message = capsys.readouterr().err
    assert "global_batch_size: 'banana'; expected: a whole number from 1" in message
    assert "correct the value after --argument" in message and "another copy" not in message
    assert main(["plan", run, "--gpus", "4", "--argument", "micro_batch_size=0"]) == 2


def test_plan_in_python_and_its_counts() -> None:
    """The public function returns documented data; it counts parameters as `inspect` does, and says the release."""
    run: Path = fixture_named("p01").run
    found = mcore_ckpt_ext.plan(run, 8)
    assert isinstance(found, mcore_ckpt_ext.LayoutPlan) and isinstance(found.layouts[0], mcore_ckpt_ext.PlannedLayout)
    assert found.parameters == mcore_ckpt_ext.inspect(run).model["parameters"]
    assert found.megatron_version_source == "installed"
    assert plan(run, 8, megatron_version="0.16.1").megatron_version_source == "as stated"
