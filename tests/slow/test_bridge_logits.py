"""Compare models in Megatron-Bridge: its own classes answer as transformers does, as `run_config.yaml` describes them.

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
from tests.harness.huggingface import VOCABULARY, add_further_layer, make
from tests.harness.jobs import MAMBA_KERNELS, RANK_SCRIPTS, TIME_LIMIT
from tests.harness.packages import installed_beside, with_transformer_engine
from tests.harness.published_logits import TOLERANCE
from tests.harness.witnesses import BUILT_BY_BRIDGE, LAYOUTS, SHOWN

# Latent attention, experts in some layers, variants of attention, Mamba mixers, RoPE on a part of a head.
DESCRIBED = ("deepseek_v3", "glm4_moe", "qwen2_moe", "deepseek_v32", "qwen3_next", "gpt_oss", "nemotron_h", "nemotron")
# Models to which a layer of multi-token prediction is added; it does not change their logits.
WITH_MTP = {"deepseek_v3_mtp": "deepseek_v3", "glm4_moe_mtp": "glm4_moe"}
MODELS = [("imported", name) for name in BUILT_BY_BRIDGE]
MODELS += [("described", name) for name in (*BUILT_BY_BRIDGE, *DESCRIBED, *WITH_MTP)]
BRIDGE = os.environ.get("BRIDGE_VERSION", "0.6.2")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Return the logits of Bridge's two models, and those of transformers."""
    root = tmp_path_factory.mktemp("bridge-logits")
    tokens = torch.arange(40).view(2, 20) * 7 % VOCABULARY
    torch.save(tokens, root / "tokens")
    cases, expected = [], {}
    for name in (*BUILT_BY_BRIDGE, *DESCRIBED, *WITH_MTP):
        kind = WITH_MTP.get(name, name)
        make(kind, root / name)
        model = AutoModelForCausalLM.from_pretrained(root / name, attn_implementation="eager")
        with torch.no_grad():
            expected[name] = model(tokens).logits
        if name in WITH_MTP:
            add_further_layer(root / name)
        mcore_ckpt_ext.convert(root / name, root / f"{name}-run", mcore_ckpt_ext.TorchDist(loop="bridge"))
        run = open_checkpoint(root / f"{name}-run").files.folder
        (layout,) = SHOWN[kind].bridge or ("TP1",)
        cases.append({"source": str(root / name), "run": str(run), "tensor": LAYOUTS[layout][0],
                      "imports": name in BUILT_BY_BRIDGE, "tokens": str(root / "tokens"),
                      "answer": str(root / f"{name}.answer")})  # fmt: skip
    (root / "cases.json").write_text(json.dumps(cases))
    packages = installed_beside("megatron-bridge", BRIDGE, "--only-binary=:all:")
    with pytest.MonkeyPatch.context() as patch:
        with_transformer_engine(patch)
        result = launch.run(
            2, RANK_SCRIPTS / "bridge_logits.py", [str(packages), str(root / "cases.json")],
            timeout=TIME_LIMIT, plugin_files=[MAMBA_KERNELS, launch.ENGINE_PASSES],
        )  # fmt: skip
    assert result.returncode == 0, result.output[-6000:]
    return {name: (torch.load(root / f"{name}.answer"), expected[name]) for name in expected}


@pytest.mark.parametrize(("model", "name"), MODELS)
def test_bridge_answers_as_transformers_does(
    model: str, name: str, answers: dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]]
) -> None:
    """The model that `AutoBridge` makes of the folder, and that of the checkpoint's `run_config.yaml`."""
    answer, expected = answers[name]
    difference = (answer[model][..., :VOCABULARY] - expected).abs().max() / expected.abs().max()
    assert float(difference) <= TOLERANCE
