"""Test that genuine Megatron-LM 0.19.2 resumes under another layout if the package is only installed.

The hooks are loaded by autoload. The live optimizer is dumped from the tensors that training uses, on every rank, right
after loading, and compared with the state of the job that saved.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron_on_cpu.dump_optimizer import assemble, training_state

from tests.harness.jobs import (
    LAST,
    SAVED,
    Job,
    assert_same_optimizer,
    assert_same_training_state,
    differing,
    resume,
    train_and_save,
    with_vocabulary,
)
from tests.harness.layouts import Layout
from tests.harness.models import LLAMA
from tests.harness.rehearsals import rehearsal_of_resume

ASYNCHRONOUS = "scheduled an async checkpoint save"


def assert_resumed(saved: Job, resumed: Job) -> None:
    """Everything that was saved is there again, rank 0 said so in one line, and a rehearsal would have foreseen it."""
    assert_same_optimizer(saved.at_save, resumed.at_load)
    assert_same_training_state(saved.at_save, resumed.at_load)
    said = resumed.summary
    assert (said["source"], said["target"]) == (str(saved.layout), str(resumed.layout))
    assert (said["format"], said["witnesses"]) == ("dp_reshardable", "the sidecar")
    rehearsed = rehearsal_of_resume(saved.run, resumed.layout)
    assert rehearsed.will_succeed, rehearsed.refusal
    assert said["megabytes"] == f"{rehearsed.optimizer_bytes_read / 1e6:,.1f}"
    # A rehearsal counts the master and both moments of each.
    assert rehearsed.elements == 3 * int(said["elements"].replace(",", ""))


def test_the_save_was_asynchronous_in_fact(gpt: Job) -> None:
    assert ASYNCHRONOUS in gpt.output


def test_the_switch_to_the_persistent_worker_is_said_once(gpt: Job) -> None:
    (line,) = [line for line in gpt.said if "--async-save" in line]
    assert line.startswith("[rank 0] ")
    assert "use_persistent_ckpt_worker = True" in line


@pytest.mark.parametrize(
    "layout", [Layout(2, 2, 4), Layout(1, 1, 4), Layout(4, 2, 8), Layout(1, 2, 4, virtual=True)], ids=str
)
def test_gpt_saved_as_tp1_pp4_resumes_with_every_element(gpt: Job, layout: Layout, folder: Path) -> None:
    resumed = resume(folder, layout, gpt.run, more=["--use-dist-ckpt", "--async-save"])
    assert_resumed(gpt, resumed)
    assert list(resumed.losses) == [SAVED + 1]


def test_llama_saved_as_tp2_pp2_resumes_as_tp1_pp4(llama: Job, folder: Path) -> None:
    resumed = resume(folder, Layout(1, 4, 8, vocabulary=256), llama.run, more=LLAMA)
    assert_resumed(llama, resumed)


def test_the_summary_names_all_that_happened(gpt: Job, folder: Path) -> None:
    """From, to, format, bytes, parameters, elements, witness, seconds; that it is one line of rank 0, `summary` sees.

    With default padding the vocabulary has 256 rows here and had 128: the rows are zeros, in weights and moments.
    """
    layout = Layout(2, 1, 2, vocabulary=256)
    resumed = resume(folder, layout, gpt.run)
    expected = with_vocabulary(assemble(gpt.at_save), rows=256)
    found = assemble(resumed.at_load)
    assert differing(expected, found) == []
    assert not torch.any(found["exp_avg_sq.embedding.word_embeddings.weight"][128:])
    assert_same_training_state(gpt.at_save, resumed.at_load)

    said = resumed.summary
    assert (said["source"], said["target"]) == (str(gpt.layout), str(layout))
    assert said["format"] == "dp_reshardable"
    assert said["witnesses"] == "the sidecar"
    masters = [name for name in expected if name.startswith("fp32_param.")]
    assert int(said["parameters"]) == len(masters)
    # Two tensor-parallel ranks: what tensor parallelism does not cut is held, and read, twice; zeros are not read.
    held = sum(shard_elements(found[name], name) for name in masters)
    assert int(said["elements"].replace(",", "")) == held
    read = 12 * (held - 128 * 32)
    assert said["megabytes"] == f"{read / 1e6:,.1f}"
    assert float(said["seconds"]) < 100


def shard_elements(tensor: torch.Tensor, name: str) -> int:
    """Elements of a parameter on both of two tensor-parallel ranks together."""
    cut = ("word_embeddings.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias",
           "linear_proj.weight", "linear_fc2.weight")  # fmt: skip
    return tensor.numel() * (1 if name.endswith(cut) else 2)


def test_a_smaller_padded_vocabulary_loses_only_padding(llama: Job, folder: Path) -> None:
    """Megatron pads the 128 tokens to 256 rows under TP2 and to 128 under TP1, by default."""
    resumed = resume(folder, Layout(1, 1, 2), llama.run, more=LLAMA)
    saved = assemble(llama.at_save)
    assert saved["fp32_param.output_layer.weight"].shape[0] == 256
    assert differing(with_vocabulary(saved, rows=128), assemble(resumed.at_load)) == []


@pytest.mark.parametrize(
    "layout", [Layout(2, 2, 8), pytest.param(Layout(1, 2, 4, virtual=True), marks=pytest.mark.nightly)], ids=str
)
def test_in_fp32_the_next_four_losses_are_those_of_the_uninterrupted_run(
    fp32_gpt: Job, layout: Layout, folder: Path
) -> None:
    resumed = resume(folder, layout, fp32_gpt.run, precision=(), until=LAST)
    assert_resumed(fp32_gpt, resumed)
    expected = {iteration: loss for iteration, loss in fp32_gpt.losses.items() if iteration > SAVED}
    assert list(expected) == [5, 6, 7, 8]
    assert resumed.losses == pytest.approx(expected, rel=1e-5)


def test_the_gradient_scaler_of_fp16_training_is_carried(tmp_path: Path) -> None:
    """Its scale has grown once, and it has counted one more good step, when it is saved."""
    fp16 = ["--fp16", "--initial-loss-scale", "1024", "--loss-scale-window", "3"]
    saved = train_and_save(tmp_path / "saved", Layout(1, 2, 4), precision=fp16)
    resumed = resume(tmp_path / "resumed", Layout(2, 1, 2), saved.run, precision=fp16)
    (scaler,) = training_state(resumed.at_load)["grad_scalers"]
    assert float(scaler["scale"]) == 2048
    assert scaler["growth_tracker"] == 1
    assert_resumed(saved, resumed)
