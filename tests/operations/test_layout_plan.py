"""Test `plan`: memory needs against genuine ranks, the choice of listed layouts, and bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt_ext.cli.main import main
from mcore_ckpt_ext.errors import UnsupportedCheckpointError, UsageError
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.job.dimensions import PINS
from mcore_ckpt_ext.job.job_arguments import JobArguments
from mcore_ckpt_ext.layout.grad_buffer import align, bucket_alignment
from mcore_ckpt_ext.layout.local_parameters import Cut
from mcore_ckpt_ext.layout.parallel import ParallelLayout
from mcore_ckpt_ext.layout_choice.choice import Choice
from mcore_ckpt_ext.layout_choice.found_layout import SearchRequest
from mcore_ckpt_ext.layout_choice.layer_wise import layer_wise_stages
from mcore_ckpt_ext.layout_choice.memory import CONTEXT, Buffers, memory_of
from mcore_ckpt_ext.layout_choice.model_table import Holding, ModelTable, Parameter, StageHolding
from mcore_ckpt_ext.layout_choice.padded_rows import PaddedRows
from mcore_ckpt_ext.layout_choice.rules import violations
from mcore_ckpt_ext.layout_choice.search import search
from mcore_ckpt_ext.layout_choice.stage_activations import StageActivations
from mcore_ckpt_ext.layout_choice.stage_split import StageSplit, layout_string, stage_splits
from mcore_ckpt_ext.operations.job_buffers import buffers_of
from mcore_ckpt_ext.operations.layout_plan import plan
from mcore_ckpt_ext.operations.parameter_table import state_bytes, table_of
from mcore_ckpt_ext.rehearsal.rehearse import rehearse
from mcore_ckpt_ext.rehearsal.target import sizes_in
from mcore_ckpt_ext.versions import NEWEST, Version
from tests.harness.checkpoints import INTACT, fixture_named

IDLE = StageActivations(0, 0, 0)
WITH_BUFFERS = [name for name in INTACT if name.split("_")[0] not in ("p07", "p08c", "p31", "p32", "p33")]


def choice_of(name: str) -> Choice:
    """A fixture under its own layout."""
    checkpoint = open_checkpoint(fixture_named(name).run)
    job, layout = checkpoint.job.arguments(), checkpoint.job.layout
    split = next(stage_splits(job, layout.pipeline, layout.virtual_pipeline, NEWEST))
    return Choice(job, table_of(checkpoint, job), layout, split, 1, 8, NEWEST)


def holdings_of(choice: Choice) -> list[StageHolding]:
    """What a rank of each pipeline stage holds."""
    layout = choice.layout
    assert choice.split is not None
    return choice.table.stages(choice.split.ranges, layout.tensor, layout.expert_tensor, layout.expert)


@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_elements_are_those_of_genuine_ranks(name: str) -> None:
    """Parameters and gradient buffers of every rank have exactly as many elements as the live job had."""
    choice = choice_of(name)
    held = holdings_of(choice)
    for rank in fixture_named(name).job["ranks"]:
        stage = held[rank["coords"]["pp"]]
        parameters = sum(prod(shape) for one in rank["params"] for shape in one["local_shape"])
        assert stage.dense.elements + stage.experts.elements == parameters
        for kind, holding in (("buffers", stage.dense), ("expert_parallel_buffers", stage.experts)):
            buffers = [one for one in rank["buffers"] if one["kind"] == kind]
            if len(buffers) == 1:  # virtual stages have a buffer each
                ranks = buffers[0]["dp_group_size"]
                assert align(holding.aligned, bucket_alignment(ranks, False)) == buffers[0]["numel"]


@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_memory_is_that_of_genuine_ranks(name: str) -> None:
    """The static memory of the fullest rank is within 2 % of what the live job allocated."""
    choice = choice_of(name)
    planned = max(memory_of(stage, choice, Buffers(4), IDLE).static for stage in holdings_of(choice))
    genuine = []
    for rank in fixture_named(name).job["ranks"]:
        buffers = rank["buffers"]
        # bf16 weights and fp32 gradients lie in the buffers; fp32 master and moments of a share of each.
        genuine.append(sum(one["numel"] * 6 + one["numel"] * 12 // one["dp_group_size"] for one in buffers))
    assert planned == pytest.approx(max(genuine), rel=0.02)


@pytest.mark.parametrize("name", ["p41", "p42", "p43", "p44", "p45", "p46", "p47", "p47b", "p48"])
def test_memory_of_other_optimizers(name: str) -> None:
    """Static memory is within 2 % of what the live job allocated: Muon, offloaded, in other precisions."""
    choice = choice_of(name)
    buffers = buffers_of(choice.job, choice.table, Version(0, 19))
    held = holdings_of(choice)
    if buffers.layer_wise is not None and choice.split is not None:
        ranges = choice.split.ranges
        held = [*layer_wise_stages(choice.table, ranges, choice.layout, held, buffers.layer_wise, high_bandwidth=False)]
    needed = [memory_of(stage, choice, buffers, IDLE) for stage in held]
    planned = max(memory.static + memory.host for memory in needed)
    genuine = max(map(bytes_of_rank, fixture_named(name).job["ranks"]))
    assert planned == (genuine if buffers.layer_wise else pytest.approx(genuine, rel=0.02))


def bytes_of_rank(rank: dict[str, Any]) -> int:
    """The buffers of weights and gradients of a live rank, and the state of its optimizers."""

    def width(dtype: str) -> int:
        return int(getattr(torch, dtype.removeprefix("torch.")).itemsize)

    found = sum(one["numel"] * (width(one["param_dtype"]) + width(one["grad_dtype"])) for one in rank["buffers"])
    for one in rank["params"]:
        if one["optim"] is None:
            continue
        start, end = one["optim"]["param"]
        for kind, dtype in one["optim"]["live_dtypes"].items():
            is_weight = kind == "fp32_param" and width(one["dtype"]) == 4
            found += 0 if is_weight else (end - start) * width(dtype)
    return found


@pytest.mark.parametrize("name", ["p01", "p09", "p22", "p41", "p47"])
def test_bytes_read_are_those_that_genuine_ranks_hold(name: str) -> None:
    """Under its own layout a rank reads its weights and its own state, however the optimizer is distributed."""
    fixture = fixture_named(name)
    layout = open_checkpoint(fixture.run).job.layout
    pins = {
        label: getattr(layout, attribute) for label, attribute in PINS.items() if attribute not in ("virtual_pipeline",)
    }
    (planned, *_) = plan(fixture.run, layout.world, pins=pins, most=None).layouts
    held = [bytes_kept(rank) for rank in fixture.job["ranks"]]
    # Flat buffers are cut into equal parts, padding included, so a rank's share may be a little smaller.
    assert planned.read_per_rank == pytest.approx(max(held), rel=0.05)
    assert planned.read_in_all == pytest.approx(sum(held), rel=0.05)
    copies = len({rank["coords"]["dp"] for rank in fixture.job["ranks"]})
    assert planned.read_once < planned.read_in_all if copies > 1 else planned.read_once <= planned.read_in_all


def test_whole_state_is_read_by_every_rank() -> None:
    """An optimizer that is not distributed is read as often as there are data-parallel ranks."""
    (planned, *_) = plan(fixture_named("p41").run, 8, pins={"tp": 2, "pp": 2}, most=None).layouts
    once = planned.read_once
    assert once == sum(prod(one.shape) * (one.weight_bytes + 12) for one in choice_of("p41").table.parameters)
    assert planned.read_in_all > 2 * once * 0.99


def bytes_kept(rank: dict[str, Any]) -> int:
    """The weights of a live rank, and the state that it keeps of its optimizer, with the weights of remainders."""
    found = 0
    for one in rank["params"]:
        elements = sum(prod(shape) for shape in one["local_shape"])
        found += elements * int(getattr(torch, one["dtype"].removeprefix("torch.")).itemsize)
        if one["optim"] is not None:
            start, end = one["optim"]["param"]
            # Older fixtures are all of fp32 masters and moments.
            for dtype in one["optim"].get("live_dtypes", dict.fromkeys(["master", "m", "v"], "float32")).values():
                joined = 2 if dtype.endswith("int16") else 0  # a master is read as its weight and its remainder
                found += (end - start) * (int(getattr(torch, dtype.removeprefix("torch.")).itemsize) + joined)
    return found


def test_the_kind_of_optimizer_counts() -> None:
    """Remainders take 2 bytes where masters take 4; an optimizer that is not distributed is on every rank."""
    adam = {one.state_bytes for one in choice_of("p10").table.parameters}
    remainders = {one.state_bytes for one in choice_of("p47").table.parameters}
    assert (adam, remainders) == ({12}, {10})
    aware = {"bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
    assert state_bytes(JobArguments.of(aware)) == 8  # 2 + 2 + 4
    assert state_bytes(JobArguments.of(aware | {"fp8_recipe": "blockwise"})) == 10
    assert state_bytes(JobArguments.of(aware | {"optimizer_cpu_offload": True})) == 12
    whole = choice_of("p41").table.parameters
    assert not any(one.is_distributed for one in whole)
    fp32 = {one.state_bytes for one in choice_of("p42").table.parameters}
    assert fp32 == {8}  # the weights are the masters


def test_offloaded_state_is_in_host_memory() -> None:
    """With `--optimizer-offload-fraction 0.5`, half of the optimizer is on the GPU."""
    found = plan(fixture_named("p46").run, 4, pins={"tp": 2, "pp": 1})
    memory = found.layouts[0].memory
    assert memory.host > 0
    assert memory.optimizer == pytest.approx(memory.host, abs=1)


def test_best_layouts_first() -> None:
    """Layouts that do not fit come last, whatever else speaks for them."""
    run_folder = fixture_named("p01").run
    known = plan(run_folder, 8, gpu_memory=CONTEXT + (512 << 20) + 450_000, most=None)
    fits = [one.fits for one in known.layouts]
    assert fits == sorted(fits, reverse=True) and True in fits and False in fits
    # Without a size, the old layout is known to fit, and what needs more is not known to.
    guessed = plan(run_folder, 8, most=None)
    assert guessed.layouts[0].layout == "TP1 x PP4 x DP2"
    assert guessed.gpu_memory_source == "at least: TP1 x PP4 x DP2 needs it, and its job ran"
    assert {one.fits for one in guessed.layouts} == {True, None}
    assert all(one.fits for one in guessed.layouts if one.layout == "TP1 x PP4 x DP2")
    assert {one.layout for one in plan(run_folder, 8, pins={"tp": 2, "pp": 2, "vpp": 1}).layouts} == {"TP2 x PP2 x DP2"}


def test_no_flag_names_a_global_batch_beside_its_schedule() -> None:
    """`validate_args` refuses both; the sizes are those of the schedule, whatever the layout of the job was."""
    stated = {"step_batch_size_schedule": "0:4 1K:12", "global_batch_size": 2}
    for layout in plan(fixture_named("p10").run, 2, arguments=stated).layouts:
        assert layout.global_batch_size == 12
        assert "--micro-batch-size" in layout.flags and "--global-batch-size" not in layout.flags


def test_virtual_stages_run_every_step_of_the_batch_to_come() -> None:
    """A step of 3 samples is no multiple of the pipeline size 2, and its schedule of micro batches stops."""
    run = fixture_named("p01").run
    pins = {"tp": 1, "pp": 2, "vpp": 2}
    for schedule, accepted in (("0:4 1M:12", True), ("0:3 1M:12", False), ("0:3 1K:12", True)):
        found = plan(run, 2, pins=pins, arguments={"step_batch_size_schedule": schedule}).layouts
        assert any(layout.global_batch_size == 12 and layout.sizes["dp"] == 1 for layout in found) is accepted


@pytest.mark.parametrize(
    ("schedule", "ignored_by", "run_by"),
    [
        ({"rampup_batch_size": [2, 2, 300]}, "0.18", "0.17"),
        ({"step_batch_size_schedule": "0:4 1M:8", "global_batch_size": 2}, "0.17", "0.18"),
    ],
)
def test_a_schedule_of_the_batch_that_the_release_ignores_is_named(
    schedule: dict[str, Any], ignored_by: str, run_by: str
) -> None:
    """The flags state its last batch, and training is another one."""
    pins = {"tp": 1, "pp": 2}
    (kept,) = plan(fixture_named("p01").run, 4, pins=pins, arguments=schedule, megatron_version=run_by, most=1).layouts
    (lost,) = plan(
        fixture_named("p01").run, 4, pins=pins, arguments=schedule, megatron_version=ignored_by, most=1
    ).layouts
    flag = f"--{next(iter(schedule)).replace('_', '-')}"
    assert not any("batch" in note for note in kept.notes) and flag not in kept.removed_flags
    assert f"Megatron {ignored_by} does not run {flag}: the global batch is 8 at once" in lost.notes
    assert flag in lost.removed_flags and "--global-batch-size 8" in lost.flags
    batch = "another --global-batch-size"
    assert [batch in [row.feature for row in layout.differences] for layout in (kept, lost)] == [False, True]


@pytest.mark.parametrize(
    "schedule",
    [{"rampup_batch_size": [2, 2, 300]}, {"step_batch_size_schedule": "0:4 1M:8", "global_batch_size": 2}],
)
def test_a_schedule_of_the_batch_that_a_layout_does_not_divide_is_left_out(schedule: dict[str, Any]) -> None:
    """Megatron would stop at its first step."""
    version = "0.17" if "rampup_batch_size" in schedule else "0.19"
    (one,) = plan(
        fixture_named("p01").run, 3, pins={"tp": 1, "pp": 1}, arguments=schedule, megatron_version=version
    ).layouts
    assert (one.global_batch_size, "--global-batch-size 9" in one.flags, one.data.indivisible) == (9, True, ())
    assert f"--{next(iter(schedule)).replace('_', '-')}" in one.removed_flags
    assert any(note.startswith("a step of the batch size to come is not a multiple") for note in one.notes)


def test_flags_name_every_size() -> None:
    """The flags to paste say the layout, the split of the layers, and the batch."""
    (first, *_) = plan(fixture_named("p22").run, 8, pins={"tp": 2, "pp": 2, "ep": 2, "vpp": 1}).layouts
    flags = first.flags.split(" --")
    assert "pipeline-model-parallel-size 2" in flags and "expert-model-parallel-size 2" in flags
    assert "sequence-parallel" in flags and first.notes[-1].startswith("--sequence-parallel is needed")
    (uneven, *_) = plan(fixture_named("p01").run, 6, pins={"pp": 3, "tp": 1}).layouts
    assert "--decoder-last-pipeline-num-layers" in uneven.flags
    assert sum(uneven.layers_per_stage) == 4


def test_a_batch_that_does_not_divide() -> None:
    """Another global batch is proposed with the flag that the scheduler then needs."""
    (one,) = plan(fixture_named("p01").run, 3, pins={"tp": 1, "pp": 1}).layouts
    assert one.global_batch_size == 9 and "--override-opt_param-scheduler" in one.flags
    assert one.notes[0].startswith("the global batch changes from 8 to 9")


def test_random_state_and_stock() -> None:
    """The same TP and PP keep random states, and stock Megatron resumes them."""
    same, other = (
        plan(fixture_named("p01").run, 8, pins={"tp": tensor, "pp": 4, "vpp": 1}).layouts[0] for tensor in (1, 2)
    )
    assert same.keeps_random_state and same.stock_resumes
    assert not other.keeps_random_state and not other.stock_resumes


def test_rules_that_exclude_the_nearest_layouts() -> None:
    """Where nothing is accepted, the rules that exclude the nearest layouts are named."""
    found = plan(fixture_named("p01").run, 8, pins={"tp": 3})
    assert not found.layouts and not found.fits and set(found.excluded) == {"world size"}
    assert found.nearest[0][1] == "8 GPUs are not a multiple of TP x PP x CP = 12 (8 = 2^3)"
    uneven = plan(fixture_named("p01").run, 360, pins={"tp": 7})
    assert uneven.nearest[0][1].endswith("(360 = 2^3 x 3^2 x 5)")
    heads = plan(fixture_named("p01").run, 24, pins={"tp": 8})
    assert not heads.layouts and heads.nearest[0][1] == "4 attention heads cannot be divided by TP 8"


@pytest.mark.parametrize(
    "options", [{"gpus": 0}, {"gpus": 10**11}, {"gpus": 8, "gpus_per_node": -1}, {"gpus": 8, "pins": {"dp": 2}}]
)
def test_bad_numbers_and_names(options: dict[str, int]) -> None:
    """They are usage errors."""
    with pytest.raises(UsageError):
        plan(fixture_named("p01").run, **options)


def test_least_memory_of_all() -> None:
    """The least memory is that of every accepted layout, not of the listed ones alone."""
    run_folder = fixture_named("p01").run
    few, every = (plan(run_folder, 8, gpu_memory=1024, most=most) for most in (1, None))
    least = min(every.layouts, key=lambda one: one.memory.total)
    assert (few.least_memory, few.least_layout) == (least.memory.total, least.layout)
    assert few.layouts[0].memory.total > least.memory.total
    assert plan(run_folder, 8, pins={"tp": 3}).least_memory is None


def test_a_number_of_layers_that_the_weights_contradict() -> None:
    """It is refused, with the number that they have."""
    with pytest.raises(UnsupportedCheckpointError, match="num_layers 5; expected: 4 layers"):
        plan(fixture_named("p01").run, 6, arguments={"num_layers": 5})


@pytest.fixture(scope="module")
def without_arguments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a job that stored no arguments."""
    copy = fixture_named("p01").copy_to(tmp_path_factory.mktemp("without") / "copy")
    common = {key: value for key, value in open_checkpoint(copy.run).job.common().items() if key != "args"}
    torch.save(common, copy.iteration / "common.pt")
    return copy.run


def test_without_arguments_tensors_show_precision_and_optimizer(without_arguments: Path) -> None:
    """What is needed and does not follow from the tensors is named, and no batch size is made up."""
    stated = {"num_attention_heads": 4, "seq_length": 32}
    found = plan(without_arguments, 4, pins={"tp": 2, "pp": 2}, arguments=stated)
    known = plan(fixture_named("p01").run, 4, pins={"tp": 2, "pp": 2})
    assert found.unknown == ("global_batch_size", "micro_batch_size", "make_vocab_size_divisible_by")
    assert found.layouts[0].memory.static == pytest.approx(known.layouts[0].memory.static, rel=0.01)
    assert "batch-size" in known.layouts[0].flags and "batch-size" not in found.layouts[0].flags


def test_without_arguments_a_rehearsal_names_what_stays_unknown(without_arguments: Path) -> None:
    """It is as certain as what the checkpoint and the user say."""
    found = rehearse(without_arguments, 4, sizes_in("tp=2"), arguments={"seq_length": 32})
    assert found.will_succeed
    assert any("num_attention_heads, global_batch_size, micro_batch_size, " in one for one in found.given)
    refused = rehearse(without_arguments, 3, sizes_in("tp=3"), arguments={"num_attention_heads": 4})
    assert str(refused.refusal).endswith("4 attention heads cannot be divided by TP 3")


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes: 0 with a layout that fits, 1 without one, 2 for wrong usage."""
    path = str(fixture_named("p01").run)
    assert main(["plan", path, "--gpus", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["fits"]
    assert main(["plan", path, "--gpus", "8", "--gpu-memory", "1KiB"]) == 1
    assert "no layout fits: the smallest needs" in capsys.readouterr().out
    assert main(["plan", path, "--gpus", "8", "--pin", "tp=3"]) == 1
    assert "8 GPUs are not a multiple of TP x PP x CP" in capsys.readouterr().out
    for pin in ("xy=2", "tp=0", "tp", "tp=-1", "tp=1e3"):
        assert main(["plan", path, "--gpus", "8", "--pin", pin]) == 2, pin
    for gpus in ("0", "-1", "x"):
        assert main(["plan", path, "--gpus", gpus]) == 2, gpus


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("M*M-M*M-", {(1, 1), (2, 1), (4, 1), (8, 1)}),
        ("M*M-|M*M-", {(1, 2), (2, 1)}),
        ("M*|M-|M*|M-/MM", {(2, 2), (4, 1)}),
    ],
)
def test_stages_of_hybrid_models(pattern: str, expected: set[tuple[int, int]]) -> None:
    """Virtual stages are the segments of the pattern (`validate_args`), and no flag names them."""
    sizes = {"num_layers": 8, "hybrid_layer_pattern": pattern, "num_attention_heads": 8, "global_batch_size": 64}
    job = JobArguments.of(sizes)
    table = ModelTable([], 8, copies=0, padded_rows=PaddedRows(1, 1, 1))
    old = ParallelLayout.from_arguments(job)
    pins = {"tensor": 1, "context": 1}
    found = search(job, table, old, SearchRequest(8, 8, NEWEST, pins=pins), Buffers(4)).found
    layouts = {(one.choice.layout.pipeline, one.choice.layout.virtual_pipeline) for one in found}
    assert layouts == expected - {(1, 2)}  # one rank has no virtual stages


def test_stages_begin_with_an_indexer() -> None:
    """Layers 1, 2, 3 and 7 have one, and the others reuse what those chose (`is_dsa_skip_topk_layer`)."""
    sizes = {"num_layers": 8, "num_attention_heads": 8, "dsa_indexer_topk_freq": 4, "dsa_indexer_skip_topk_offset": 3}
    job = JobArguments.of({**sizes, "global_batch_size": 64})
    table = ModelTable([], 8, copies=0, padded_rows=PaddedRows(1, 1, 1))
    splits = {pipeline: next(stage_splits(job, pipeline, 1, NEWEST)) for pipeline in (1, 2)}
    splits[3] = StageSplit(((2,), (4,), (2,)), ())
    found = {}
    for pipeline, split in splits.items():
        ranks = {"pipeline_model_parallel_size": pipeline, "world_size": pipeline}
        layout = ParallelLayout.from_arguments(JobArguments.of({**sizes, **ranks}))
        choice = Choice(job, table, layout, split, 1, 64, NEWEST)
        found[pipeline] = [name for name, _ in violations(choice)]
    assert found == {1: [], 2: ["shared indexers"], 3: []}


@pytest.mark.parametrize("width", [80, 200])
def test_width_of_the_table(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the table stay within the terminal; a wide one shows every column."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["plan", str(fixture_named("p22").run), "--gpus", "8", "--read-rate", "1MiB"]) == 0
    _, _, below = capsys.readouterr().out.partition("best first\n")
    rows = below.partition("\n\n")[0].splitlines()
    assert len(rows) > 5 and max(map(len, rows)) <= width
    assert ("stock resumes" in rows[0]) == (width == 200)


def test_more_stages_than_layers() -> None:
    """Stages may hold the embedding or the loss alone; still more of them are excluded, with the reason."""
    (one,) = plan(fixture_named("p01").run, 6, pins={"pp": 6}).layouts
    assert one.layers_per_stage == (0, 1, 1, 1, 1, 0) and "--pipeline-model-parallel-layout 'E|(t|)*4L'" in one.flags
    none = plan(fixture_named("p01").run, 12, pins={"pp": 12})
    assert set(none.excluded) == {"layers per stage"}


def test_layout_strings() -> None:
    """They repeat equal stages, and put multi-token prediction before the loss."""
    assert layout_string([1, 2, 2, 2, 1]) == "Et|(tt|)*3tL"
    assert layout_string([1, 2, 1], 1) == "Et|tt|tmL"
    assert layout_string([4]) == "EttttL"


def deepseek_v3() -> tuple[JobArguments, ModelTable]:
    """A model of the size of DeepSeek-V3: 61 layers, 256 experts, 671 billion parameters."""
    sizes = {
        "num_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_experts": 256, "seq_length": 4096,
        "ffn_hidden_size": 18432, "moe_ffn_hidden_size": 2048, "global_batch_size": 15360, "micro_batch_size": 1,
        "bf16": True, "use_distributed_optimizer": True, "transformer_impl": "transformer_engine",
    }  # fmt: skip
    table = [Parameter("embedding", (129280, 7168), 2, -1, Cut(0), None, True, 12, 12)]
    table += [Parameter("output", (129280, 7168), 2, -2, Cut(0), None, True, 12, 12)]
    for layer in range(61):
        shapes = [(1536, 7168), (24576, 1536), (32768, 512), (7168, 16384)]
        table += [
            Parameter(f"{layer}.{n}", shape, 2, layer, Cut(0), None, False, 12, 12) for n, shape in enumerate(shapes)
        ]
        for expert in range(256 if layer > 2 else 0):
            up = Parameter(f"{layer}.fc1.{expert}", (4096, 7168), 2, layer, Cut(0, 2), expert, False, 12, 12)
            table += [up, replace(up, name=f"{layer}.fc2.{expert}", shape=(7168, 2048), cut=Cut(1))]
    return JobArguments.of(sizes), ModelTable(table, 61, copies=0, padded_rows=PaddedRows(129280, 0, 128))


def test_sixty_one_layers_over_sixteen_stages() -> None:
    """What does not divide evenly is divided by a flag, and the fullest stage counts."""
    job, table = deepseek_v3()
    old = replace(ParallelLayout.from_arguments(job), pipeline=16, expert=64, data=128, world=2048)
    pins = {"pipeline": 16, "tensor": 1, "context": 1, "virtual_pipeline": 1, "expert": 64, "expert_tensor": 1}
    (found,) = search(job, table, old, SearchRequest(2048, 8, NEWEST, pins=pins), Buffers(4)).found
    assert found.choice.split is not None
    assert dict(found.choice.split.arguments)["decoder_last_pipeline_num_layers"] == 1
    assert found.choice.split.largest == 4
    assert table.elements > 650e9


@pytest.mark.thorough
@pytest.mark.nightly
def test_nineteen_hundred_gpus_in_seconds() -> None:
    """A search over every layout of a large model builds few combinations that some rule excludes."""
    job, table = deepseek_v3()
    old = replace(ParallelLayout.from_arguments(job), pipeline=16, expert=64, data=128, world=2048)
    result = search(job, table, old, SearchRequest(1920, 8, NEWEST), Buffers(4))
    assert len(result.found) == 27719
    assert sum(result.excluded.values()) < len(result.found)
    assert set(result.excluded) == {"attention heads", "experts", "expert world size", "sequence length"}
    _, nearest, reason = result.nearest["experts"]
    assert (str(nearest), reason) == ("TP1 x PP16 x EP60 x DP120", "256 experts cannot be divided by EP 60")


def test_an_empty_holding_needs_nothing() -> None:
    """A stage without experts has no buffer of experts."""
    choice = choice_of("p01")
    assert memory_of(StageHolding(Holding(), Holding()), choice, Buffers(4), IDLE).allocated == 0
