"""Test models that genuine Megatron trained for some steps: exported and run by transformers, the loss is equal.

One is trained from scratch, the other from a converted Hugging Face folder, with the flags that the conversion printed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megatron_on_cpu import launch, toy_jobs
from transformers import AutoModelForCausalLM

import mcore_ckpt_ext
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.hugging_face.model import LOCAL
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from tests.harness.huggingface import VOCABULARY
from tests.harness.jobs import TIME_LIMIT, WITNESS, finished, run_job
from tests.harness.layouts import Layout

pytestmark = pytest.mark.nightly

# The whole vocabulary is the tokenizer's: padding takes part in Megatron's softmax, and in no other's.
TOKENS = {"gpt2": 128, "llama": VOCABULARY}
STEPS = 8
JOB = (
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --split 99,1,0"
    " --eval-iters 0 --eval-interval 100 --log-interval 1 --ckpt-format torch_dist --use-distributed-optimizer"
    f" --make-vocab-size-divisible-by 1 --vocab-size {VOCABULARY} --seq-length 32 --tensor-model-parallel-size 2"
    f" --train-iters {STEPS} --save-interval {STEPS}"
).split()


def flags_of(folder: Path) -> list[str]:
    checkpoint = open_checkpoint(folder, transformer_impl=LOCAL).format.reader
    assert isinstance(checkpoint, HuggingFaceCheckpoint)
    return checkpoint.training_flags()


def train_from_the_start(folder: Path) -> Path:
    """A GPT-2 like the demonstration's."""
    layout = Layout(2, 1, 2)
    more = ["--vocab-size", str(TOKENS["gpt2"])]
    job = finished(folder, layout, run_job(folder, layout, saves=True, precision=(), more=more, until=STEPS))
    assert job.losses[STEPS] < job.losses[1]
    return job.run


def train_on(model: Path, folder: Path) -> Path:
    """A Llama from Hugging Face."""
    mcore_ckpt_ext.convert(model, folder / "release", mcore_ckpt_ext.TorchDist(transformer_impl=LOCAL))
    arguments = [*toy_jobs.CPU, *JOB, "--load", str(folder / "release"), "--save", str(folder / "run")]
    result = launch.run(2, launch.TRAIN_GPT, [*arguments, *flags_of(model)], timeout=TIME_LIMIT)
    assert result.returncode == 0, result.output[-6000:]
    assert "loading release distributed checkpoint" in result.output
    assert (folder / "run" / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    return folder / "run"


@pytest.fixture(scope="module")
def losses(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, float]]:
    """Of each model the loss by Megatron from its own checkpoint, and by transformers from the export."""
    root = tmp_path_factory.mktemp("trained")
    runs = {"gpt2": train_from_the_start(root / "gpt2"), "llama": train_on(models["llama"], root / "llama")}
    cases, found = [], {}
    for name, run in runs.items():
        batch = torch.randint(0, TOKENS[name], (4, 32), generator=torch.Generator().manual_seed(3))
        torch.save(batch, root / f"{name}.tokens")
        mcore_ckpt_ext.convert(run, root / f"{name}-hf", mcore_ckpt_ext.HuggingFace())
        found[name] = _loss_by_transformers(root / f"{name}-hf", batch)
        cases.append(
            {"run": str(run), "flags": [*flags_of(root / f"{name}-hf"), "--make-vocab-size-divisible-by", "1"],
             "tensor": 1, "expert": 1, "loss": True, "vocabulary": TOKENS[name],
             "tokens": str(root / f"{name}.tokens"), "answer": str(root / f"{name}.answer")}
        )  # fmt: skip
    (root / "cases.json").write_text(json.dumps(cases))
    result = launch.run(1, WITNESS, [str(root / "cases.json")], timeout=TIME_LIMIT, log_file=root / "log")
    assert result.returncode == 0, result.output[-6000:]
    return {name: (float(torch.load(root / f"{name}.answer")), found[name]) for name in runs}


def _loss_by_transformers(folder: Path, batch: torch.Tensor) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    with torch.no_grad():
        return float(model(batch, labels=batch).loss)


@pytest.mark.parametrize("name", TOKENS)
def test_the_loss_is_the_same(name: str, losses: dict[str, tuple[float, float]]) -> None:
    by_megatron, by_transformers = losses[name]
    assert by_transformers == pytest.approx(by_megatron, rel=1e-5)


def test_the_loss_is_of_the_trained_model(models: dict[str, Path], losses: dict[str, tuple[float, float]]) -> None:
    batch = torch.randint(0, TOKENS["llama"], (4, 32), generator=torch.Generator().manual_seed(3))
    before = _loss_by_transformers(models["llama"], batch)
    assert losses["llama"][1] != pytest.approx(before, rel=1e-3)
