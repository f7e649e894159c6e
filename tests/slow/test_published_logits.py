"""Test that genuine Megatron answers as transformers does, for 32 scaled-down published configurations.

Two ranks serve all of them: TP2, and EP2 for experts; first with the local layer spec, then with Transformer Engine's.
Weights are in fp32, whatever the file says; `scripts/scaled_configs.py` defines the sizes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_on_cpu import launch

import mcore_ckpt_ext
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from mcore_ckpt_ext.formats.hugging_face.reader import HuggingFaceCheckpoint
from mcore_ckpt_ext.formats.target import LayerSpec
from scripts.scaled_configs import VOCABULARY
from tests.harness.jobs import WITNESS
from tests.harness.packages import with_transformer_engine
from tests.harness.published_configs import configuration, make_published

TIME_LIMIT = 900
# Of the largest logit. Where rounding alone may do more, what it does to transformers' own answer is the measure.
TOLERANCE, OWN_ROUNDINGS = 1e-5, 3
# Their epsilon is transformers' own, whatever `rms_norm_eps` is: a conversion says so (families/deepseek.py).
INNER_NORMS = ("q_a_layernorm", "kv_a_layernorm")
TOKENS = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(5))
DENSE = (
    "llama-2-7b", "llama-3.1-8b", "codellama-7b", "allam-7b", "smollm2-360m", "yi-34b", "mlc--tinyllama_1b_chat_v0.4",
    "mistral-7b", "mistral-nemo", "qwen2.5-7b", "mimo-7b", "aic--qwen--qwen3-8b", "gpt2-medium", "gpt-bigcode",
    "starcoder2", "phi-4", "stablelm", "devstral-2-123b", "ministral3-3b", "qwen3-vl-2b",
)  # fmt: skip
WITH_EXPERTS = (
    "mixtral-8x22b", "qwen2moe", "qwen3-30b-a3b", "qwen3-coder-480b", "mx--deepseek3_671b", "glm-4.5", "gpt-oss-120b",
)  # fmt: skip
WITH_DELTA_NETS = ("qwen3-next-80b", "qwen3.5-9b", "qwen3.5-35b-a3b")
OF_ENGINE = (*WITH_DELTA_NETS, "deepseek-v3.2", "glm-5.1")
LOCAL: LayerSpec = "local"
ENGINE: LayerSpec = "transformer_engine"
CASES = [*((LOCAL, name) for name in (*DENSE, *WITH_EXPERTS)), *((ENGINE, name) for name in OF_ENGINE)]


@dataclass(frozen=True)
class Truth:
    """What transformers answers: logits `[2, 40, vocabulary]`, and how far others may be, relative to the largest."""

    logits: torch.Tensor
    tolerance: float


@pytest.fixture(scope="module")
def excess(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Of each configuration the largest difference of its logits, as a multiple of what it may be."""
    root = tmp_path_factory.mktemp("published")
    torch.save(TOKENS, root / "tokens")
    found = _excess(root / LOCAL, LOCAL)
    with pytest.MonkeyPatch.context() as patch:
        with_transformer_engine(patch)
        return found | _excess(root / ENGINE, ENGINE, launch.ENGINE_PASSES)


def _excess(folder: Path, spec: LayerSpec, *plugins: Path) -> dict[str, float]:
    folder.mkdir()
    names = [name for of, name in CASES if of == spec]
    truths = {name: _truth(name, folder / name) for name in names}
    cases = [_case(name, folder / name, spec) for name in names]
    (folder / "cases.json").write_text(json.dumps(cases))
    result = launch.run(
        2, WITNESS, [str(folder / "cases.json")], timeout=TIME_LIMIT, log_file=folder / "log", plugin_files=plugins
    )
    assert result.returncode == 0, result.output[-6000:]
    found = {}
    for case in cases:
        truth, answer = truths[case["name"]], torch.load(case["answer"])[..., :VOCABULARY]
        found[case["name"]] = _apart(answer, truth.logits) / truth.tolerance
    return found


def _apart(answer: torch.Tensor, truth: torch.Tensor) -> float:
    return float((answer - truth).abs().max() / truth.abs().max())


def _truth(name: str, folder: Path) -> Truth:
    """What transformers answers; the model lies in `model` of the folder then."""
    config = configuration(name)
    for part in (config, config.get("text_config") or {}):
        part |= {key: "float32" for key in ("torch_dtype", "dtype") if part.get(key)}
    folder.mkdir()
    model = make_published(config, folder / "model")
    for label, module in model.named_modules():
        if label.endswith(INNER_NORMS):
            module.variance_epsilon = model.config.rms_norm_eps
    with torch.no_grad():
        logits = model(TOKENS).logits
        rounding = _apart(_token_by_token(model), logits) if name in WITH_DELTA_NETS else 0.0
    return Truth(logits, max(TOLERANCE, OWN_ROUNDINGS * rounding))


def _token_by_token(model: Any) -> torch.Tensor:
    """The same logits as a model computes them with its cache."""
    found, cache = [], None
    for step in TOKENS.split(1, dim=1):
        answer = model(step, past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        found.append(answer.logits)
    return torch.cat(found, dim=1)


def _case(name: str, folder: Path, spec: LayerSpec) -> dict[str, Any]:
    mcore_ckpt_ext.convert(folder / "model", folder / "run", mcore_ckpt_ext.TorchDist(transformer_impl=spec))
    checkpoint = open_checkpoint(folder / "model", transformer_impl=spec).format_reader
    assert isinstance(checkpoint, HuggingFaceCheckpoint)
    experts = 2 if checkpoint.model.num_experts else 1
    # Megatron shares an indexer among tensor-parallel ranks with sequence parallelism only.
    tensor = 1 if experts > 1 or "dsa" in str(checkpoint.model.get("experimental_attention_variant")) else 2
    return {
        "name": name, "run": str(folder / "run"), "tensor": tensor, "expert": experts, "vocabulary": VOCABULARY,
        "flags": [*checkpoint.training_flags(), "--transformer-impl", spec], "answer": str(folder / "answer"),
        "tokens": str(folder.parents[1] / "tokens"),
    }  # fmt: skip


@pytest.mark.parametrize("name", [name for _, name in CASES])
def test_megatron_answers_as_transformers_does(name: str, excess: dict[str, float]) -> None:
    assert excess[name] <= 1
