"""A checkpoint in the format of ColossalAI's Booster, written by torch alone; real ones are in tests/colossalai."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.harness.huggingface import make

MOMENTS_AND_MASTERS = ("exp_avg", "exp_avg_sq", "fp32_param")


def _indexed(folder: Path, base: str, entries: dict[Any, Any], metadata: dict[str, Any]) -> None:
    """Write two shards and their index, as checkpoint_io/index_file.py of 0.5.0 does."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = list(entries)
    places: dict[str, str] = {}
    for number, some in enumerate((keys[::2], keys[1::2]), 1):
        file = f"{base}-{number:05d}.bin"
        torch.save({key: entries[key] for key in some}, folder / file)
        places.update((str(key), file) for key in some)
    (folder / f"{base}.bin.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": places}))


def colossalai_checkpoint(root: Path, weights: str = "modeling", optimizer: str = "optimizer") -> Path:
    """Write a checkpoint of GPT-2, with an optimizer's state of each of its parameters."""
    model = make("gpt2", root / "source")
    checkpoint = root / "saved"
    _indexed(checkpoint / weights, "pytorch_model", dict(model.state_dict()), {"total_size": 1})
    for name in ("config.json", "generation_config.json"):
        (checkpoint / weights / name).write_bytes((root / "source" / name).read_bytes())
    parameters = list(model.parameters())
    states = {
        number: {"step": 3, **{kind: torch.full_like(parameter.data, number) for kind in MOMENTS_AND_MASTERS}}
        for number, parameter in enumerate(parameters)
    }
    groups = "pytorch_optim_group.bin"
    _indexed(checkpoint / optimizer, "pytorch_optim", states, {"param_groups": groups, "total_size": 1})
    torch.save([{"lr": 0.5, "params": list(range(len(parameters)))}], checkpoint / optimizer / groups)
    return checkpoint
