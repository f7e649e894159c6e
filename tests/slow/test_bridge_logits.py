"""Compare models that only Megatron-Bridge builds: its own classes answer as transformers does.

The layers are Transformer Engine's, which compute in torch what their kernels would (`engine_passes`).
"""

from __future__ import annotations

import json
import os

import pytest
import torch
from megatron_on_cpu import launch
from transformers import AutoModelForCausalLM

import mcore_ckpt_ext
from mcore_ckpt_ext.formats.checkpoint import open_checkpoint
from tests.harness.huggingface import VOCABULARY, make
from tests.harness.jobs import RANK_SCRIPTS, TIME_LIMIT
from tests.harness.packages import installed_beside, with_transformer_engine
from tests.harness.published_logits import TOLERANCE
from tests.harness.witnesses import BUILT_BY_BRIDGE

BRIDGE = os.environ.get("BRIDGE_VERSION", "0.6.2")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the logits of Bridge under TP2, and those of transformers."""
    root = tmp_path_factory.mktemp("bridge-logits")
    tokens = torch.arange(40).view(2, 20) * 7 % VOCABULARY
    torch.save(tokens, root / "tokens")
    cases, expected = [], {}
    for name in BUILT_BY_BRIDGE:
        make(name, root / name)
        model = AutoModelForCausalLM.from_pretrained(root / name, attn_implementation="eager")
        with torch.no_grad():
            expected[name] = model(tokens).logits
        mcore_ckpt_ext.convert(root / name, root / f"{name}-run", mcore_ckpt_ext.TorchDist(loop="bridge"))
        run = open_checkpoint(root / f"{name}-run").folder
        cases.append({"source": str(root / name), "run": str(run), "tokens": str(root / "tokens"),
                      "answer": str(root / f"{name}.answer")})  # fmt: skip
    (root / "cases.json").write_text(json.dumps(cases))
    packages = installed_beside("megatron-bridge", BRIDGE, "--only-binary=:all:")
    with pytest.MonkeyPatch.context() as patch:
        with_transformer_engine(patch)
        result = launch.run(
            2, RANK_SCRIPTS / "bridge_logits.py", [str(packages), str(root / "cases.json")],
            timeout=TIME_LIMIT, plugin_files=[launch.ENGINE_PASSES],
        )  # fmt: skip
    assert result.returncode == 0, result.output[-6000:]
    return {name: (torch.load(root / f"{name}.answer"), expected[name]) for name in BUILT_BY_BRIDGE}


@pytest.mark.parametrize("name", BUILT_BY_BRIDGE)
def test_bridge_answers_as_transformers_does(name: str, answers: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    answer, expected = answers[name]
    difference = (answer[..., :VOCABULARY] - expected).abs().max() / expected.abs().max()
    assert float(difference) <= TOLERANCE
