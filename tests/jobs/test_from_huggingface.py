"""Test genuine Megatron-LM jobs that start from a Hugging Face folder, under several layouts.

One of them exports such a folder with its checkpoint during training. The folders are made from real checkpoints, so
the reference is the memory of the genuine Megatron that wrote those. `test_huggingface_witness.py` compares the logits
of all families in jobs that load the folder itself.
"""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest
import torch
from megatron_on_cpu.dump_optimizer import MOMENTS_VARIABLE, assemble
from safetensors.torch import load_file, save_file

from mcore_ckpt_ext import HuggingFace, compare, convert
from mcore_ckpt_ext.families.flags import training_flags
from mcore_ckpt_ext.formats.hugging_face.model import described_model
from tests.harness.checkpoints import fixture_named
from tests.harness.jobs import Job, differing, with_vocabulary
from tests.harness.layouts import VOCABULARY, Layout, experts_over
from tests.harness.turns import Results, Turn, run_in_turn

pytestmark = pytest.mark.nightly

# Seconds for an export, on processors that have other things to do.
PATIENCE = 200
# A Llama of TP2 x PP2, and a Mixtral of EP2 x PP2.
SOURCES = {"dense": "p02", "experts": "p09"}
LAYOUTS = {"dense": Layout(2, 2, 4, virtual=True), "experts": experts_over(1, 2, 4, 2)}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("from_huggingface")
    flags = {}
    for name, source in SOURCES.items():
        convert(fixture_named(source).run, root / f"{name}-model", HuggingFace())
        model = described_model(root / f"{name}-model", transformer_impl="local").arguments
        flags[name] = [*training_flags(model), "--no-bias-swiglu-fusion"]
    pretrained = ["--load", str(root / "dense" / "checkpoints"), "--pretrained-checkpoint", str(root / "dense-model")]
    again = [*flags["dense"], *pretrained]
    shutil.copytree(root / "dense-model", root / "diverged-model")
    (file,) = (root / "diverged-model").glob("*.safetensors")
    weights = load_file(file)
    weights["model.layers.3.mlp.down_proj.weight"][0, 5] = torch.nan
    save_file(weights, file)
    turns = [
        Turn(root / "dense", LAYOUTS["dense"], saves=True, until=4, environment={MOMENTS_VARIABLE: "load,save"},
             more=[*again, "--async-save", "--ckpt-ext-export-hf", "4"]),
        Turn(root / "dense again", LAYOUTS["dense"], more=again),
        Turn(root / "experts", LAYOUTS["experts"], load=root / "experts-model", until=1,
             more=[*flags["experts"], "--moe-token-dispatcher-type", "alltoall", "--ckpt-ext-from-hf",
                   "--moe-expert-capacity-factor", "8"]),
        Turn(root / "another model", LAYOUTS["dense"], load=root / "dense-model", until=1,
             more=[*flags["dense"], "--rotary-base", "5000", "--qk-layernorm"]),
        Turn(root / "diverged", LAYOUTS["dense"], load=root / "diverged-model", until=1, more=flags["dense"]),
    ]  # fmt: skip
    grown = [*flags["dense"], "--vocab-size", "300"]
    rows = {"load": root / "dense-model", "until": 1, "more": grown}
    turns += [
        Turn(root / "new tokens", LAYOUTS["dense"], **rows),
        Turn(root / "new tokens kept", LAYOUTS["dense"], environment={"MCORE_CKPT_EXT_NEW_TOKENS": "keep"}, **rows),
    ]
    return run_in_turn(root, turns)


def assert_starts_from(job: Job, source: str) -> None:
    """Weights are those of the checkpoint that the folder was made of, and masters are the same numbers."""
    truth, found = fixture_named(source).truth, assemble(job.at_load)
    weights = {name: tensor for name, tensor in found.items() if name.startswith("weight.")}
    expected = {name: tensor for name, tensor in truth.items() if name in weights}
    assert len(expected) == len(weights) > 20
    assert differing(with_vocabulary(expected, VOCABULARY), weights) == []
    for name, weight in weights.items():
        assert torch.equal(found[name.replace("weight.", "fp32_param.", 1)], weight.float()), name
    assert sum("the weights of the Hugging Face folder" in line for line in job.said) == 1


def test_experts_under_another_layout(started: Results) -> None:
    job = started.job("experts")
    assert_starts_from(job, "p09")
    assert job.losses.keys() == {1}
    assert any("--moe-expert-capacity-factor 8.0: the job drops tokens" in line for line in job.said)


def test_weights_that_are_no_numbers_are_no_beginning(started: Results) -> None:
    result = started["diverged"]
    assert result.returncode != 0
    assert "1 of " in result.output
    assert "; where: decoder.layers.3.mlp.linear_fc2.weight" in result.output
    assert "found: NaN or infinite: " in result.output


def test_a_job_begins_with_the_folder_and_goes_on_from_its_own_checkpoint(started: Results) -> None:
    """`--load RUN --pretrained-checkpoint FOLDER`, the same words on both days."""
    first, second = started.job("dense"), started.folder("dense again")
    assert_starts_from(first, "p02")
    assert started["dense again"].returncode == 0
    assert "the weights of the Hugging Face folder" not in started["dense again"].output
    resumed, saved = assemble(second / "dump" / "after_load"), assemble(first.at_save)
    assert differing(saved, resumed) == []


def test_a_checkpoint_is_a_hugging_face_folder_too(started: Results) -> None:
    """Made in the background, of the finished checkpoint of an asynchronous save; its `config.json` is as it was."""
    run = started.folder("dense") / "checkpoints"
    folder, deadline = run / "hf" / "iter_0000004", time.monotonic() + PATIENCE
    while not folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert compare(run, folder).equal
    begun_with = run.parents[1] / "dense-model"
    assert not compare(begun_with, folder).equal
    assert [path.name for path in folder.parent.iterdir()] == ["iter_0000004"]
    configs = [json.loads((model / "config.json").read_text()) for model in (begun_with, folder)]
    assert configs[0] == configs[1]


def test_arguments_that_contradict_the_folder_are_named_before_anything_is_built(started: Results) -> None:
    result = started["another model"]
    assert result.returncode != 0
    assert "the arguments of the job contradict config.json, which describes a Llama" in result.output
    assert "qk_layernorm is True, for which it has no key" in result.output
    assert "rotary_base is 5000, not 10000" in result.output
    assert "number of parameters on" not in result.output
    assert "number of parameters on" in started["dense"].output


def test_tokens_that_the_folder_has_no_row_for(started: Results) -> None:
    assert started["new tokens"].returncode != 0
    assert "new are tokens " in started["new tokens"].output
    kept = started.job("new tokens kept")
    assert "their rows keep the model's own initialization" in kept.output
    found, rows = assemble(kept.at_load), int(re.search(r"new are tokens (\d+) to 299", kept.output)[1])
    for table in ("embedding.word_embeddings.weight", "output_layer.weight"):
        weight = found[f"weight.{table}"]
        assert weight[rows:300].any(dim=1).all()
        assert torch.equal(found[f"fp32_param.{table}"], weight.float())
