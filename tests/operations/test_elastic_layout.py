"""The layout of a job that goes on, chosen from real checkpoints."""

from __future__ import annotations

import pytest

from mcore_ckpt_ext import choose_layout, plan
from mcore_ckpt_ext.job.dimensions import PINS
from mcore_ckpt_ext.rehearsal.rehearse import rehearse
from tests.harness.checkpoints import fixture_named


@pytest.mark.parametrize(("name", "gpus"), [("p02", 6), ("p02", 2), ("p01", 3), ("p41", 2), ("p41", 6)])
def test_a_rehearsal_of_the_choice_agrees(name: str, gpus: int) -> None:
    run = fixture_named(name).run
    chosen = choose_layout(run, gpus, gpus_per_node=2)
    sizes = {PINS[label]: size for label, size in chosen.sizes.items() if label != "dp"}
    changes = {
        label: chosen.arguments[label] for label in ("make_vocab_size_divisible_by",) if label in chosen.arguments
    }
    rehearsal = rehearse(run, chosen.gpus, sizes, changes=changes)
    assert rehearsal.will_succeed, rehearsal.refusal
    assert rehearsal.new_layout == chosen.layout


def test_the_flags_of_the_job_come_before_those_of_the_checkpoint() -> None:
    """A checkpoint may be of a job that went on with fewer GPUs: the flags' own layout is taken when they return."""
    run = fixture_named("p02").run  # TP2 x PP2 x DP2
    flags = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4, "expert_tensor_parallel_size": None}
    chosen = choose_layout(run, 4, arguments=flags)
    assert (chosen.layout, chosen.is_of_flags) == ("TP1 x PP4 x DP1", True)
    assert choose_layout(run, 2, arguments=flags).reason.endswith("in place of TP1 x PP4 x DP1; global batch 8 kept")


def test_the_rows_of_the_vocabulary_are_kept() -> None:
    run = fixture_named("p02").run
    for gpus in range(1, 9):
        chosen = choose_layout(run, gpus)
        assert not [note for note in chosen.notes if "padded" in note]


JOBS = ("p01", "p02", "p03", "p07", "p08", "p09", "p12", "p21", "p22", "p41", "p43", "p46", "p48")


@pytest.mark.thorough
@pytest.mark.parametrize(("node", "memory"), [(2, None), (8, 80 << 30)])
@pytest.mark.parametrize("name", JOBS)
def test_the_choice_is_the_first_line_of_the_plan(name: str, node: int, memory: int | None) -> None:
    """For the GPUs that train, with its flags: as many as before, fewer, and more."""
    run = fixture_named(name).run
    for gpus in (3, 4, 6, 8, 12):
        chosen = choose_layout(run, gpus, gpus_per_node=node, gpu_memory=memory)
        first = plan(run, chosen.gpus, gpus_per_node=node, gpu_memory=memory, most=1).layouts[0]
        assert (chosen.sizes, chosen.flags) == (first.sizes, first.flags), gpus
        assert chosen.global_batch_size == first.global_batch_size


def test_a_schedule_of_the_batch_is_kept() -> None:
    """Its job states no global batch, which Megatron would refuse."""
    stated = {"step_batch_size_schedule": "0:4 1M:12", "global_batch_size": None}
    for gpus in (3, 6, 8):
        chosen = choose_layout(fixture_named("p01").run, gpus, arguments=stated)
        assert chosen.global_batch_size == 12 and 4 % (chosen.sizes["dp"] * chosen.micro_batch_size) == 0
        assert "global_batch_size" not in chosen.arguments and "--global-batch-size" not in chosen.flags


def test_the_schedule_is_kept_where_iterations_stand_for_other_numbers_of_samples() -> None:
    """Megatron multiplies those of `--lr-warmup-iters` by micro batch x DP, beside a schedule of the batch."""
    stated = {"step_batch_size_schedule": "0:4 1M:12", "global_batch_size": 2}
    for ranks, keeps in ((2, False), (4, True)):
        chosen = choose_layout(fixture_named("p01").run, 4 * ranks, arguments=stated)
        assert (chosen.sizes["pp"], chosen.sizes["dp"] * chosen.micro_batch_size) == (4, ranks)
        assert chosen.arguments.get("use_checkpoint_opt_param_scheduler", False) is keeps
        assert ("--use-checkpoint-opt_param-scheduler" in chosen.flags) is keeps
