"""Jobs of Megatron-FSDP and of torch's FSDP that load one checkpoint after the other (see `ranks/fsdp_loads.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron_on_cpu.dump_optimizer import MOMENTS_VARIABLE
from safetensors.torch import load_file

from tests.harness.jobs import RANK_SCRIPTS

FSDP = [
    "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params", "--ckpt-format", "fsdp_dtensor",
]  # fmt: skip
PLUGINS = [RANK_SCRIPTS / "fsdp_on_cpu.py", RANK_SCRIPTS / "fsdp_loads.py"]
TORCH_FSDP = ["--use-torch-fsdp2", "--ckpt-format", "torch_dcp", "--num-layers", "2"]
TORCH_FSDP += ["--untie-embeddings-and-output-weights"]


def loading(folder: Path, runs: Mapping[str, Path]) -> dict[str, str]:
    """Return the environment of a job that loads these; its optimizer has DTensors, which only its plugin dumps."""
    folder.mkdir()
    # `convert` writes no random state.
    order = [
        (name, {"load": str(run), "no_load_rng": name == "back", "no_load_optim": name == "weights"})
        for name, run in runs.items()
    ]
    (folder / "order.json").write_text(json.dumps(order))
    return {MOMENTS_VARIABLE: "never", "TEST_LOADS": str(folder / "order.json")}


def live_state(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the live state after a load, in model space.

    Modules of the local layer spec have separate norms; checkpoints name them as fused ones.
    """
    return {
        key.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_").replace(
            ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"
        ): value
        for key, value in load_file(folder / f"{name}.safetensors").items()
    }


def reported(folder: Path, name: str) -> dict[str, Any]:
    """Return the error of a load, the iteration, and the settings of each parameter group."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found
