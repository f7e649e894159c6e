"""PEFT folders with random adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK, ALPHA = 3, 5
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "init_lora_weights": True}
Tensors = dict[str, torch.Tensor]


def adapter(module: str, out: int, into: int) -> Tensors:
    """Return an adapter of one linear with random numbers."""
    name = f"base_model.model.{module}"
    return {f"{name}.lora_A.weight": torch.randn(RANK, into), f"{name}.lora_B.weight": torch.randn(out, RANK)}


def peft_folder(folder: Path, content: Mapping[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(dict(content), folder / "adapter_model.safetensors")
    ends = (".lora_A.weight", ".lora_B.weight")
    modules = sorted({name[17:].removesuffix(end) for name in content for end in ends if name.endswith(end)})
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "target_modules": modules, **config}))
    return folder
