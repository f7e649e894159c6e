"""The live state of adapters."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron_on_cpu.dump_optimizer import assemble


def adapters(dump: Path, mark: str = ".adapter.") -> dict[str, torch.Tensor]:
    """Return weights, masters and moments of adapters alone, because the model's differ between layouts."""
    found = {name: tensor for name, tensor in assemble(dump).items() if mark in name}
    assert {name.partition(".")[0] for name in found} == {"weight", "fp32_param", "exp_avg", "exp_avg_sq"}
    return found
