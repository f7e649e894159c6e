"""Test that genuine Megatron answers as transformers does, for 32 scaled-down published configurations.

Two ranks serve all of them: TP2, and EP2 for experts; first with the local layer spec, then with Transformer Engine's.
A sample of them is in `tests/jobs/test_huggingface_witness.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megatron_on_cpu import launch

from mcore_ckpt_ext.formats.target import LayerSpec
from tests.harness.jobs import WITNESS
from tests.harness.packages import with_transformer_engine
from tests.harness.published_logits import TOKENS, expected_logits, megatron_case

TIME_LIMIT = 900
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
    expected = {
        name: expected_logits(name, folder / name, decodes_differently=name in WITH_DELTA_NETS) for name in names
    }
    cases = [megatron_case(name, folder / name, spec, folder.parent / "tokens") for name in names]
    (folder / "cases.json").write_text(json.dumps(cases))
    result = launch.run(
        2, WITNESS, [str(folder / "cases.json")], timeout=TIME_LIMIT, log_file=folder / "log", plugin_files=plugins
    )
    assert result.returncode == 0, result.output[-6000:]
    return {case["name"]: expected[case["name"]].excess(torch.load(case["answer"])) for case in cases}


@pytest.mark.parametrize("name", [name for _, name in CASES])
def test_megatron_answers_as_transformers_does(name: str, excess: dict[str, float]) -> None:
    assert excess[name] <= 1
