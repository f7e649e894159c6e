"""Optimizer states of models of Hugging Face families, resumed under another TP, PP and EP.

The states are random: no job of these models ran. They are stored under one layout, must be equal there, and a resume
under another layout is rehearsed by the code of a live one, which compares all masters with their weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_ckpt_ext import Canonical, Legacy, TorchDist, compare, convert
from mcore_ckpt_ext.families.recognition import family_named
from mcore_ckpt_ext.rehearsal.rehearse import rehearse
from mcore_ckpt_ext.rehearsal.target import sizes_in
from tests.harness.witnesses import COMPUTES_AS, OF_OWN_CODE

OWN_CODE = Path(__file__).with_name("own_code")
# Models of tests/harness/huggingface.py whose parameters are not those of a model that jobs resume.
WITH_A_CLASS = ("exaone_moe", "gpt_bigcode", "hy_v3", "mamba2", "nemotron")
_BUFFERS = ("expert_bias", "local_tokens_per_expert")


@pytest.mark.parametrize("name", [*COMPUTES_AS, *OF_OWN_CODE, *WITH_A_CLASS])
def test_an_optimizer_is_resumed_under_another_layout(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    model = models[name] if name in WITH_A_CLASS else OWN_CODE / name
    trained, stored = tmp_path / "trained", tmp_path / "stored"
    arguments = family_named(name).arguments(json.loads((model / "config.json").read_text()))
    _add_optimizer(model, trained, has_experts=bool(arguments.num_experts))
    experts = 2 if arguments.num_experts else 1
    layout = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": experts}
    # Legacy files do not say which rank holds multi-token prediction.
    convert(trained, stored, TorchDist() if arguments.mtp_num_layers else Legacy(**layout))
    assert compare(trained, stored).equal
    resumed = rehearse(stored, 4, sizes_in("pp=2 ep=2" if experts > 1 else "tp=2 pp=2"), full=True)
    assert resumed.will_succeed, resumed.refusal


def _add_optimizer(model: Path, folder: Path, *, has_experts: bool) -> None:
    """Convert a model, and add masters equal to its weights, and random moments."""
    convert(model, folder, Canonical())
    (file,) = folder.glob("*.safetensors")
    tensors = {key: tensor for key, tensor in load_file(file).items() if key.startswith("weight.")}
    random = torch.Generator().manual_seed(3)
    for key, weight in [*tensors.items()]:
        name = key.removeprefix("weight.")
        if not name.endswith(_BUFFERS):
            tensors[f"fp32_param.{name}"] = weight.float()
            tensors[f"exp_avg.{name}"] = torch.randn(weight.shape, generator=random)
            tensors[f"exp_avg_sq.{name}"] = torch.rand(weight.shape, generator=random)
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, file)
    _update(folder / "model.safetensors.index.json", weight_map=dict.fromkeys(tensors, file.name))
    groups = [_group(decay, of_experts) for of_experts in (False, True)[: 1 + has_experts] for decay in (0.01, 0.0)]
    common = json.loads((folder / "common.json").read_text())
    common["common"]["args"]["$namespace"]["use_distributed_optimizer"] = True
    common["common"]["opt_param_scheduler"] = {
        "num_steps": 32, "max_lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 0, "lr_decay_steps": 320,
        "lr_decay_style": "linear",
    }  # fmt: skip
    common["source"]["released"] = False
    # Version 1 has no checksums.
    _update(folder / "common.json", **{**common, "version": 1, "iteration": 4, "param_groups": groups})


def _group(weight_decay: float, of_experts: bool) -> dict[str, Any]:
    return {
        "is_expert_parallel": of_experts, "default_config": True, "is_decoupled_lr": False, "lr_mult": 1.0,
        "wd_mult": float(weight_decay > 0), "weight_decay": weight_decay, "lr": 1e-3, "max_lr": 1e-3, "min_lr": 1e-4,
        "betas": {"$tuple": [0.9, 0.999]}, "eps": 1e-8, "bias_correction": True, "step": 4,
    }  # fmt: skip


def _update(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
