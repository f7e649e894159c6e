"""Models that genuine Megatron trained for some steps, exported and run by transformers: the same loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import mcore_ckpt_ext
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.huggingface import LOCAL, HuggingFaceCheckpoint
from tests.huggingface.test_witness import TIME_LIMIT, WITNESS
from tests.online.jobs import LOCAL_SPEC_LLAMA, Layout, finished, run_job

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from megatron_on_cpu import launch

MODELS = {"gpt2": (), "llama": LOCAL_SPEC_LLAMA}
# The whole vocabulary is the tokenizer's: padding takes part in Megatron's softmax, and in no other's.
TOKENS = 128
STEPS = 8


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, float]]:
    """Of each model the loss by Megatron from its own checkpoint, and by transformers from the export."""
    root = tmp_path_factory.mktemp("trained")
    torch.save(torch.randint(0, TOKENS, (4, 32), generator=torch.Generator().manual_seed(3)), root / "tokens")
    cases, found = [], {}
    for name, flags in MODELS.items():
        layout = Layout(2, 1, 2)
        more = [*flags, "--vocab-size", str(TOKENS)]
        result = run_job(root / name, layout, saves=True, precision=(), more=more, until=STEPS)
        job = finished(root / name, layout, result)
        assert job.losses[STEPS] < job.losses[1]
        mcore_ckpt_ext.convert(job.run, root / f"{name}-hf", to="hf")
        found[name] = _loss_by_transformers(root / f"{name}-hf", root / "tokens")
        exported = open_checkpoint(root / f"{name}-hf", transformer_impl=LOCAL)
        assert isinstance(exported, HuggingFaceCheckpoint)
        cases.append(
            {"run": str(job.run), "flags": exported.training_flags(), "tensor": 1, "expert": 1, "loss": True,
             "vocabulary": TOKENS, "tokens": str(root / "tokens"), "answer": str(root / f"{name}.answer")}
        )  # fmt: skip
    (root / "cases.json").write_text(json.dumps(cases))
    result = launch.run(1, WITNESS, [str(root / "cases.json")], timeout=TIME_LIMIT, log_file=root / "log")
    assert result.returncode == 0, result.output[-6000:]
    return {name: (float(torch.load(root / f"{name}.answer")), found[name]) for name in MODELS}


def _loss_by_transformers(folder: Path, tokens: Path) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == TOKENS
    batch = torch.load(tokens)
    with torch.no_grad():
        return float(model(batch, labels=batch).loss)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_same(name: str, losses: dict[str, tuple[float, float]]) -> None:
    by_megatron, by_transformers = losses[name]
    assert by_transformers == pytest.approx(by_megatron, rel=1e-5)
